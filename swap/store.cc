// The replay of schedules. The step thread dispatches each lane's next task once the counters it
// waits for are reached, and sleeps when there is none.
#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "direct.h"
#include "object_table.h"
#include "scoreboard.h"
#include "swap/store.h"
#include "team_threads.h"

namespace ferry::swap {
namespace {

constexpr std::array<Lane, kLanes> kAllLanes = {Lane::compute, Lane::h2d,  Lane::d2h,   Lane::team,
                                                Lane::check,   Lane::read, Lane::write, Lane::comm};

// A device's streams are the first lanes.
constexpr StreamKind stream_of(Lane lane) { return static_cast<StreamKind>(lane); }
static_assert(stream_of(Lane::compute) == StreamKind::compute &&
              stream_of(Lane::h2d) == StreamKind::h2d && stream_of(Lane::d2h) == StreamKind::d2h &&
              static_cast<int>(Lane::d2h) + 1 == kStreams);

// A task between dispatch and completion.
struct Flight {
    Call call{};
    aio::Operation operation{};
    Kernels* kernels = nullptr;
    const char* name = "";
    int64_t step = -1;
    std::atomic<bool> finished = false;  // of the lanes whose tasks may end in another order
    bool beside = false;                 // of the team: what Kernels::runs_beside() said
    size_t thread = 0;                   // of the team: which runs it
    Nanos dispatched_ns = 0;
};

}  // namespace

class Store::Replay {
public:
    Replay(Store& store, StoreOptions options, Executor& executor, Device& device,
           aio::Volume* volume, Kernels& kernels)
        : store_(store),
          options_(std::move(options)),
          executor_(executor),
          device_(device),
          volume_(volume),
          kernels_(kernels),
          table_({options_.objects, options_.host_slots, options_.host_arena, options_.parallel},
                 device.memory(), volume),
          direct_(table_, executor, device, volume),
          board_(options_.resources) {
        // One more than can be in flight: a job has counted itself done a moment before it returns.
        team_ = {executor.add_lane("team", kFlights + 1),
                 executor.add_lane("team 2", kFlights + 1)};
        check_ = executor.add_lane("check", kFlights + 1);
        for (auto& flights : flights_) flights = std::vector<Flight>(kFlights);
        wrong_.reserve(kFlights);
        for (int64_t id = 0; id < table_.size(); ++id)
            table_.place_initially(static_cast<ObjectId>(id));
    }

    // Waits for what is in flight: its jobs and kernels call the store.
    void finish() {
        while (!board_.none_in_flight()) {
            collect();
            if (!board_.none_in_flight()) executor_.wait(kForever);
        }
    }

    void append(const Schedule& schedule, int64_t sequence, int64_t step) {
        board_.append(schedule, sequence).step = step;
    }

    void run_to_outcome() {
        FERRY_CHECK(board_.newest().schedule->has_outcome, "this schedule has no outcome");
        run_until([this] {
            return !wanted_ && board_.reached(board_.newest(), board_.newest().schedule->outcome);
        });
    }

    void drain() {
        run_until([this] { return !wanted_ && !publishing_ && board_.all_complete(); });
        board_.forget_schedules();
    }

    void publish(std::span<const std::byte> state) {
        FERRY_CHECK(options_.verify && !wanted_, "one publication at a time, with checksums");
        wanted_ = Wanted{state, board_.committed_writes()};
    }

    void wait_published() {
        run_until([this] { return !wanted_ && !publishing_; });
    }

    std::optional<std::span<const std::byte>> restore(size_t n) {
        {
            const std::lock_guard lock(failure_mutex_);
            failure_.reset();
            failed_ = false;
            wrong_.clear();
        }
        const std::span<const std::byte> record = found_record(n);
        if (record.empty()) return std::nullopt;
        volume_->resume_from(n);
        const auto map = static_cast<size_t>(map_bytes(options_.objects));
        if (record.size() < map || !table_.restore(record.first(map)))
            throw Error(Trouble::io, {.what = "a record of what is stored names other slots or "
                                              "objects than there are",
                                      .where = "record " + std::to_string(n + 1) + " of 2"});
        return record.subspan(map);
    }

    void put(ObjectId object, std::span<std::byte> bytes) {
        direct_.begin_put(object, bytes);
        direct_.end_puts(0);
    }
    void begin_put(ObjectId object, std::span<std::byte> bytes) {
        direct_.begin_put(object, bytes);
    }
    void end_puts(int64_t under_way) { direct_.end_puts(under_way); }
    std::span<std::byte> in_host(ObjectId object) noexcept { return direct_.in_host(object); }

    void get(ObjectId object, std::span<std::byte> bytes) {
        direct_.get(object, bytes);
        if (table_.object(object).home == Tier::nvme) verify(object, bytes);
        throw_failure();
    }

    void seal(ObjectId object, std::span<const std::byte> bytes) noexcept {
        if (options_.verify) table_.seal(object, bytes);
    }

    bool verify(ObjectId object, std::span<const std::byte> bytes) noexcept {
        const int64_t wrong = options_.verify ? table_.verify(object, bytes) : -1;
        if (wrong < 0) return true;
        note_wrong(object);
        fail(table_.wrong_bytes(object, wrong));
        return false;
    }

    void fail(Error error) noexcept {
        const std::lock_guard lock(failure_mutex_);
        if (!failure_) failure_ = std::move(error);
        failed_.store(true, std::memory_order_release);
    }

    Wrong what_was_wrong() const noexcept {
        const std::lock_guard lock(failure_mutex_);
        if (wrong_.empty()) return Wrong::none;
        const bool published = std::ranges::any_of(
            wrong_, [this](ObjectId object) { return table_.is_durable(object); });
        return published ? Wrong::in_published : Wrong::elsewhere;
    }

    std::array<LaneReport, kLanes> report() const { return reports_; }
    void reset_report() { reports_ = {}; }

private:
    // Tasks dispatched and not complete, a lane. Compute needs few: its tasks are long.
    static constexpr int kFlights = 64;

    static size_t at(Lane lane) { return static_cast<size_t>(lane); }

    std::span<const std::byte> found_record(size_t n) const try {
        return volume_->found_record(n);
    } catch (const Error& error) {
        throw TransferFailed(error);
    }

    template <class Goal>
    void run_until(const Goal& goal) {
        while (true) {
            collect();
            throw_failure();
            move_publication();
            if (goal()) return;
            const bool dispatched = dispatch_ready();
            if (!dispatched) executor_.wait(kForever);
        }
    }

    // Ends the publication under way, whose slots are then free, and starts the one that is wanted.
    // Until then no later step's version becomes current: run_to_outcome() has not returned.
    void move_publication() {
        if (publishing_ && volume_->published()) {
            publishing_ = false;
            table_.end_publication();
        }
        if (!wanted_ || publishing_ || board_.completed(Lane::write) < wanted_->writes) return;
        const std::span<std::byte> record = volume_->record();
        const auto map = static_cast<size_t>(map_bytes(options_.objects));
        const std::span<const std::byte> state = wanted_->state;
        FERRY_CHECK(map + state.size() <= record.size(), "the volume has room for the record");
        table_.begin_publication(record.first(map));
        std::copy(state.begin(), state.end(), record.begin() + static_cast<std::ptrdiff_t>(map));
        volume_->publish(static_cast<int64_t>(map + state.size()));
        wanted_.reset();
        publishing_ = true;
    }

    void note_wrong(ObjectId object) noexcept {
        const std::lock_guard lock(failure_mutex_);
        if (wrong_.size() < wrong_.capacity()) wrong_.push_back(object);
    }

    void throw_failure() {
        if (!failed_.load(std::memory_order_acquire)) return;
        const std::lock_guard lock(failure_mutex_);
        if (failure_) throw Error(*failure_);
    }

    // ---- completion

    void collect() {
        look_at_clock();
        check_device();
        check_collectives();
        for (const Lane lane : {Lane::compute, Lane::h2d, Lane::d2h, Lane::check, Lane::comm}) {
            const auto done = static_cast<int64_t>(done_[at(lane)].load(std::memory_order_acquire));
            for (int64_t i = board_.completed(lane); i < done; ++i) account(lane, i);
            board_.complete(lane, done);
        }
        while (aio::Operation* operation = volume_ ? volume_->poll() : nullptr) {
            Flight& flight = *reinterpret_cast<Flight*>(operation->tag);
            flight.finished = true;
            if (operation->state != aio::State::done) {
                if (operation->kind == aio::Kind::read) note_wrong(flight.call.task->object);
                fail(table_.to_error(flight.call.task->object, *operation));
            }
        }
        // Without a volume too: commits and rollbacks of host objects are on the write lane.
        for (const Lane lane : {Lane::team, Lane::read, Lane::write}) complete_in_order(lane);
    }

    // Work on the device fails after its call has returned: the oldest task that was not yet seen
    // done is named.
    void check_device() {
        try {
            device_.check();
        } catch (const Error& error) {
            Problem problem = error.problem();
            for (const Lane lane : {Lane::compute, Lane::h2d, Lane::d2h}) {
                if (board_.in_flight(lane) == 0) continue;
                const Flight& oldest = flight(lane, board_.completed(lane));
                problem.where +=
                    "; on " + std::string(name_of(lane)) + ": " + kernels_.describe(oldest.call);
            }
            fail(Error(error.trouble(), std::move(problem)));
        }
    }

    // Before anything that was in flight is seen done and before anything else goes there: what has
    // passed since belongs to the lanes that were busy.
    void look_at_clock() {
        const Nanos now = executor_.now(), passed = now - std::exchange(looked_ns_, now);
        if (board_.in_flight(Lane::compute) > 0) return;
        for (const Lane lane : kAllLanes) {
            if (board_.in_flight(lane) > 0) reports_[at(lane)].exposed_ns += passed;
        }
    }

    void check_collectives() {
        if (!options_.collectives) return;
        try {
            options_.collectives->check();
        } catch (const Error& error) {
            fail(error);
        }
    }

    void complete_in_order(Lane lane) {
        int64_t count = board_.completed(lane);
        for (; count < board_.taken(lane); ++count) {
            const Flight& flight = this->flight(lane, count);
            if (!flight.finished.load(std::memory_order_acquire)) break;
            const Task& task = *flight.call.task;
            if (lane == Lane::team) team_threads_.end(flight.thread, flight.beside);
            if (task.verb == Verb::write && task.commits && !failed_.load())
                table_.commit(task.object);
            account(lane, count);
        }
        board_.complete(lane, count);
    }

    void account(Lane lane, int64_t i) {
        LaneReport& report = reports_[at(lane)];
        const Nanos now = executor_.now();
        const Nanos start = std::max(flight(lane, i).dispatched_ns, last_done_ns_[at(lane)]);
        const Task& task = *flight(lane, i).call.task;
        report.busy_ns += now - start;
        last_done_ns_[at(lane)] = now;
        report.bytes += task.bytes;
        ++report.tasks;
        if (!options_.recording) return;
        options_.recording->add({.row = options_.rows[at(lane)],
                                 .name = flight(lane, i).name,
                                 .begin_ns = start,
                                 .end_ns = now,
                                 .bytes = task.bytes,
                                 .step = flight(lane, i).step,
                                 .layer = task.layer,
                                 .item = task.item});
    }

    const char* name_of_task(const Task& task) const {
        const bool named = task.verb == Verb::kernel && options_.kernel_name;
        return named ? options_.kernel_name(task.op) : name_of(task.verb);
    }

    Flight& flight(Lane lane, int64_t i) {
        return flights_[at(lane)][static_cast<size_t>(i % kFlights)];
    }

    // ---- dispatch

    bool dispatch_ready() {
        bool any = false;
        for (const Lane lane : kAllLanes) {
            const Active* active = nullptr;
            while (board_.in_flight(lane) < kFlights) {
                const Task* task = board_.next(lane, &active);
                if (!task || !board_.ready(*task, *active) || waits_for_others(*task, *active) ||
                    !dispatch(*task, *active))
                    break;
                any = true;
            }
        }
        return any;
    }

    // A kernel, for exchanges that it must not overtake (Kernels::leaves_first).
    bool waits_for_others(const Task& task, const Active& active) {
        if (task.lane != Lane::compute || !options_.collectives) return false;
        const Active* unused = nullptr;
        if (!board_.next(Lane::comm, &unused)) return false;
        return board_.is_left_before(Lane::comm, task, active, [this](const Task& exchange) {
            return kernels_.leaves_first(exchange);
        });
    }

    // False: a fresh slot or the team's threads are wanted and not free yet; completions will free
    // them.
    bool dispatch(const Task& task, const Active& active) {
        Flight& flight = this->flight(task.lane, board_.taken(task.lane));
        flight.call = {.task = &task, .sequence = active.sequence, .at = {}, .store = &store_};
        flight.kernels = &kernels_;
        flight.name = name_of_task(task);
        flight.step = active.step;
        flight.finished = false;
        flight.dispatched_ns = executor_.now();
        if (!resolve(task, flight.call)) return false;
        if (task.lane == Lane::team && !choose_thread(flight)) return false;
        if (task.lane == Lane::read || task.lane == Lane::write) {
            if (!start_storage(task, flight)) return false;
        } else {
            start_work(task, flight);
        }
        look_at_clock();
        board_.take(task.lane);
        return true;
    }

    bool resolve(const Task& task, Call& call) {
        for (size_t i = 0; i < kPlaces; ++i) {
            const OperandPlace& place = task.places[i];
            std::byte* base = nullptr;
            switch (place.kind) {
                case OperandPlace::Kind::none:
                    continue;
                case OperandPlace::Kind::device:
                    base = device_.memory().data();
                    break;
                case OperandPlace::Kind::host:
                    base = options_.host_arena.data();
                    break;
                case OperandPlace::Kind::current:
                    base = table_.current_address(place.object);
                    break;
                case OperandPlace::Kind::fresh:
                    if (!table_.reserve_fresh_address(place.object)) return false;
                    base = table_.fresh_address(place.object);
                    break;
            }
            call.at[i] = base + place.offset;
        }
        return true;
    }

    bool choose_thread(Flight& flight) {
        const Task& task = *flight.call.task;
        flight.beside = kernels_.runs_beside(task) && !shares_places(flight);
        const std::optional<size_t> thread = team_threads_.of_next(flight.beside);
        if (thread) flight.thread = *thread;
        return thread.has_value();
    }

    // With a task of the team that is in flight: a buffer in turn, say. Their lane orders these.
    bool shares_places(const Flight& next) {
        for (int64_t i = board_.completed(Lane::team); i < board_.taken(Lane::team); ++i) {
            for (const std::byte* at : flight(Lane::team, i).call.at)
                if (at && std::ranges::find(next.call.at, at) != next.call.at.end()) return true;
        }
        return false;
    }

    bool start_storage(const Task& task, Flight& flight) {
        if (task.verb == Verb::commit || task.verb == Verb::rollback) {
            task.verb == Verb::commit ? table_.commit(task.object) : table_.rollback(task.object);
            flight.finished = true;
            return true;
        }
        const std::span<std::byte> bytes(flight.call.at[0], static_cast<size_t>(task.bytes));
        const auto operation = task.verb == Verb::read
                                   ? std::optional(table_.read_into(task.object, bytes))
                                   : table_.write_from(task.object, bytes);
        if (!operation) return false;
        flight.operation = *operation;
        flight.operation.tag = reinterpret_cast<uint64_t>(&flight);
        volume_->submit(flight.operation);
        return true;
    }

    void start_work(const Task& task, Flight& flight) {
        switch (task.lane) {
            case Lane::team:
                team_threads_.begin(flight.thread, flight.beside);
                executor_.post(team_[flight.thread], job_of(flight));
                return;
            case Lane::check:
                executor_.post(check_, job_of(flight));
                return;
            case Lane::comm:
                options_.collectives->start(flight.call);
                options_.collectives->signal(done_[at(Lane::comm)]);
                return;
            default:
                break;
        }
        Stream& stream = device_.stream(stream_of(task.lane));
        if (task.verb == Verb::copy) {
            stream.copy(flight.call.at[1], flight.call.at[0], task.bytes);
        } else {
            stream.launch({[](void* context, uint64_t) {
                               const Flight& f = *static_cast<Flight*>(context);
                               const trace::Range range(f.name);
                               f.kernels->run(f.call);
                           },
                           &flight});
        }
        stream.signal(done_[at(task.lane)]);
    }

    Job job_of(Flight& flight) {
        return {[](void* context, uint64_t) {
                    Flight& f = *static_cast<Flight*>(context);
                    f.call.store->replay_->work(f);
                },
                &flight};
    }

    // On a thread of the team's or of the check lane.
    void work(Flight& flight) {
        const Task& task = *flight.call.task;
        const std::span<std::byte> bytes(flight.call.at[0], static_cast<size_t>(task.bytes));
        const trace::Range range(flight.name);
        switch (task.verb) {
            case Verb::seal:
                seal(task.object, bytes);
                break;
            case Verb::verify:
                verify(task.object, bytes);
                break;
            default:
                kernels_.run(flight.call);
        }
        // Once that is told the flight may be reused and the store may be gone.
        Executor& executor = executor_;
        if (task.lane == Lane::team)
            flight.finished.store(true, std::memory_order_release);
        else
            done_[at(task.lane)].fetch_add(1, std::memory_order_release);
        executor.wake();
    }

    Store& store_;
    StoreOptions options_;
    Executor& executor_;
    Device& device_;
    aio::Volume* volume_;
    Kernels& kernels_;
    ObjectTable table_;
    Direct direct_;
    Scoreboard board_;
    std::array<LaneId, TeamThreads::kThreads> team_{};  // the executor's lanes
    LaneId check_{};
    TeamThreads team_threads_{};
    std::array<std::vector<Flight>, kLanes> flights_{};
    std::array<std::atomic<uint64_t>, kLanes> done_{};
    std::array<LaneReport, kLanes> reports_{};
    std::array<Nanos, kLanes> last_done_ns_{};
    Nanos looked_ns_ = 0;
    struct Wanted {
        std::span<const std::byte> state;
        int64_t writes;  // completed, with which the step's outcome is known
    };
    std::optional<Wanted> wanted_;  // to be published
    bool publishing_ = false;
    mutable std::mutex failure_mutex_;
    std::vector<ObjectId> wrong_;  // bytes of these were wrong or could not be read
    std::optional<Error> failure_;
    std::atomic<bool> failed_ = false;
};

Store::Store(StoreOptions options, Executor& executor, Device& device, aio::Volume* volume,
             Kernels& kernels)
    : replay_(
          std::make_unique<Replay>(*this, std::move(options), executor, device, volume, kernels)) {}

Store::~Store() { replay_->finish(); }

std::unique_ptr<Store> Store::make(StoreOptions options, Executor& executor, Device& device,
                                   aio::Volume* volume, Kernels& kernels) {
    return std::unique_ptr<Store>(new Store(std::move(options), executor, device, volume, kernels));
}

void Store::append(const Schedule& schedule, int64_t sequence, int64_t step) {
    replay_->append(schedule, sequence, step);
}
void Store::run_to_outcome() { replay_->run_to_outcome(); }
void Store::drain() { replay_->drain(); }
void Store::put(ObjectId object, std::span<std::byte> bytes) { replay_->put(object, bytes); }
void Store::get(ObjectId object, std::span<std::byte> bytes) { replay_->get(object, bytes); }
void Store::begin_put(ObjectId object, std::span<std::byte> bytes) {
    replay_->begin_put(object, bytes);
}
void Store::end_puts(int64_t under_way) { replay_->end_puts(under_way); }
std::span<std::byte> Store::in_host(ObjectId object) noexcept { return replay_->in_host(object); }
void Store::publish(std::span<const std::byte> state) { replay_->publish(state); }
void Store::wait_published() { replay_->wait_published(); }
std::optional<std::span<const std::byte>> Store::restore(size_t n) { return replay_->restore(n); }
void Store::seal(ObjectId object, std::span<const std::byte> bytes) noexcept {
    replay_->seal(object, bytes);
}
bool Store::verify(ObjectId object, std::span<const std::byte> bytes) noexcept {
    return replay_->verify(object, bytes);
}
void Store::fail(Error error) noexcept { replay_->fail(std::move(error)); }
Store::Wrong Store::what_was_wrong() const noexcept { return replay_->what_was_wrong(); }
std::array<LaneReport, kLanes> Store::report() const { return replay_->report(); }
void Store::reset_report() { replay_->reset_report(); }

}  // namespace ferry::swap
