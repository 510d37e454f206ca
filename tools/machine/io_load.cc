#include "io_load.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <filesystem>
#include <random>

#include "base/cpu_time.h"
#include "base/files.h"
#include "io_site.h"
#include "tools/process/interrupt.h"

namespace ferry::tools {
namespace {

// Smaller blocks are hashed sooner than handed to another thread.
constexpr size_t kWorthAThread = 64 * kKiB;
constexpr std::array<std::string_view, 3> kDirections{"read", "write", "mixed"};

std::vector<std::string> slot_files_in(const std::vector<std::string>& directories) {
    std::vector<std::string> files;
    for (const std::string& directory : directories) {
        for (const auto& entry : std::filesystem::directory_iterator(directory)) {
            // One without a slot holds nothing.
            if (entry.path().filename().string().starts_with("ferry.slots") &&
                entry.file_size() > 0)
                files.push_back(entry.path().string());
        }
    }
    std::sort(files.begin(), files.end());
    return files;
}

// A ring without a file of its own would stand idle. 0: as the volume finds best.
int slot_files_for(const std::string& directory, int rings) {
    if (rings == 1) return 0;
    return is_memory(directory) ? std::max(rings, 8) : rings;
}

// Where the blocks lie, in the order in which a sequential load visits them. Neighbouring slots lie
// in different files: one stream runs through each file, as many at a time as there are files.
class Positions {
public:
    Positions() = default;
    Positions(std::span<const aio::SlotId> slots, size_t streams, int64_t block_bytes)
        : slots_(slots),
          streams_(static_cast<int64_t>(std::min(streams, slots.size()))),
          block_bytes_(block_bytes),
          blocks_per_slot_(kSlotBytes / block_bytes) {}

    int64_t count() const { return std::ssize(slots_) * blocks_per_slot_; }
    void place(int64_t position, aio::Operation& operation) const {
        const int64_t row = streams_ * blocks_per_slot_, in_row = position % row;
        const int64_t first = position / row * streams_;
        const int64_t streams = std::min(streams_, std::ssize(slots_) - first);  // the last row's
        operation.slot = slots_[static_cast<size_t>(first + in_row % streams)];
        operation.offset = in_row / streams * block_bytes_;
    }

private:
    std::span<const aio::SlotId> slots_{};
    int64_t streams_ = 1, block_bytes_ = 0, blocks_per_slot_ = 0;
};

// Visits the positions of [begin, end), in order or at random, for ever. At random each operation
// has positions of its own, so that two at a time never meet.
class Walk {
public:
    Walk(int64_t begin, int64_t end, int64_t operations, bool random)
        : begin_(begin), end_(end), next_(begin), operations_(operations), random_(random) {}
    int64_t next(uint64_t operation) {
        if (random_) {
            const auto rows = static_cast<uint64_t>((end_ - begin_) / operations_);
            const auto row = static_cast<int64_t>(numbers_() % rows);
            return begin_ + row * operations_ + static_cast<int64_t>(operation);
        }
        if (next_ == end_) next_ = begin_;
        return next_++;
    }

private:
    int64_t begin_, end_, next_, operations_;
    bool random_;
    std::mt19937_64 numbers_{std::random_device{}()};
};

// The version and the checksums of every block, for blocks of one size.
struct Seals {
    int64_t block_bytes = 0;
    int64_t known = 0;  // positions below this hold what is noted here
    size_t pieces = 1;
    std::vector<uint64_t> versions{}, sums{};

    std::span<uint64_t> of(int64_t position) {
        return std::span(sums).subspan(static_cast<size_t>(position) * pieces, pieces);
    }
};

}  // namespace

std::string name_of(AccessPattern access) {
    return (access.random ? "rand" : "") +
           std::string(kDirections[static_cast<size_t>(access.direction)]);
}

std::optional<AccessPattern> pattern_from_name(std::string_view name) {
    const bool random = name.starts_with("rand");
    if (random) name.remove_prefix(4);
    for (size_t i = 0; i < kDirections.size(); ++i) {
        if (name == kDirections[i]) return AccessPattern{static_cast<Direction>(i), random};
    }
    return std::nullopt;
}

int64_t IoMemory::limit() { return discover_topology().memory_limit_bytes / 4; }

IoMemory::IoMemory(int64_t bytes) : topology_(discover_topology()), pool_(topology_, limit()) {
    NodeTeams teams(topology_, topology_.cores());
    bytes_ = pool_.reserve("I/O buffers", bytes, teams);
    pool_.seal();
    const int64_t count = ceil_div(bytes, kMiB);
    teams.all().parallel(count, [&](int64_t part) {
        std::mt19937_64 numbers(static_cast<uint64_t>(part));
        const int64_t end = std::min(bytes, (part + 1) * kMiB);
        for (int64_t at = part * kMiB; at + 8 <= end; at += 8) {
            const uint64_t word = numbers();
            memcpy(bytes_.data() + at, &word, sizeof word);
        }
    });
}

int operations_of(const RigOptions& options) {
    const int rings = options.rings * static_cast<int>(options.directories.size());
    const int spare = std::max(2, options.depth / 2) + 2 * options.hashers;
    return rings * options.depth + spare;
}

int64_t file_bytes_needed(const RigOptions& options, int64_t block_bytes) {
    const auto paths = static_cast<int64_t>(options.directories.size());
    const int64_t blocks = ceil_div(int64_t{2} * operations_of(options), paths);
    return std::max(round_up(blocks * block_bytes, kSlotBytes), options.rings * kSlotBytes);
}

int64_t fit_into_files(RigOptions& options, int64_t block_bytes) {
    const auto too_much = [&] {
        return file_bytes_needed(options, block_bytes) > options.bytes_per_path;
    };
    while (options.rings > 1 && too_much()) options.rings /= 2;
    while (options.depth > 1 && too_much()) options.depth /= 2;
    while (block_bytes > 4 * kKiB && too_much()) block_bytes /= 2;
    return block_bytes;
}

class Rig::Impl {
public:
    Impl(const RigOptions& options, std::span<std::byte> memory)
        : options_(options),
          memory_(memory),
          works_(static_cast<size_t>(operations_of(options))),
          executor_(make_thread_executor()) {
        for (int i = 0; options.hashers > 1 && i < options.hashers; ++i)
            hashers_.push_back(
                executor_->add_lane("hash-" + std::to_string(i), operations_of(options_)));
        for (size_t i = 0; i < works_.size(); ++i) {
            works_[i].rig = this;
            works_[i].operation.tag = i;
        }
        open();
    }

    Sample run(const Load& load);
    void forget() noexcept { seals_.known = 0; }
    std::vector<std::string> files() const { return slot_files_in(options_.directories); }
    std::string_view backend_name() const noexcept { return volume_->backend_name(); }
    bool direct() const noexcept {
        bool all = true;
        for (size_t p = 0; p < options_.directories.size(); ++p)
            all &= volume_->direct(static_cast<int>(p));
        return all;
    }

private:
    enum class Step : uint8_t { idle, sealing, moving, verifying };
    // An operation, its buffer, and what a hasher is to do with it.
    struct Work {
        Impl* rig = nullptr;
        aio::Operation operation{};
        int64_t position = 0;
        uint64_t version = 0;
        Step step = Step::idle;
        std::atomic<bool> hashed = false;
        bool wrong = false;
    };

    void open();
    void lay_out(int64_t block_bytes);
    void new_seals(int64_t block_bytes);
    void write_sealed(int64_t count);
    template <class Next>
    Sample pump(bool integrity, const Next& next);
    void aim(Work& work, aio::Kind kind, int64_t position);
    void start(Work& work, bool integrity, Sample& sample);
    void hash(Work& work, Step step, Sample& sample);
    void hash_now(Work& work) noexcept;
    bool reap(Sample& sample, bool integrity);
    bool collect_hashed(Sample& sample);
    void go_on(Work& work, Sample& sample);
    void finish(Work& work, Sample& sample);

    const RigOptions options_;
    const std::span<std::byte> memory_;
    // Rings and hashers work on these until the volume and the executor are gone.
    std::vector<Work> works_;
    Seals seals_{};
    std::unique_ptr<Executor> executor_;
    std::unique_ptr<aio::Volume> volume_{};

    std::vector<LaneId> hashers_{};
    size_t next_hasher_ = 0;
    std::vector<aio::SlotId> slots_{};
    size_t streams_ = 1;
    Positions positions_{};
    std::vector<Work*> idle_{}, hashing_{};
};

void Rig::Impl::open() {
    const auto paths = static_cast<int64_t>(options_.directories.size());
    aio::VolumeOptions volume{.classes = {{.name = "bench",
                                           .slot_bytes = kSlotBytes,
                                           .slots = options_.bytes_per_path / kSlotBytes * paths}},
                              .backend = options_.backend,
                              .block_bytes = kSlotBytes,
                              .queue_depth = options_.depth,
                              .operations_max = operations_of(options_),
                              .rings = options_.rings,
                              .direct = options_.direct,
                              .run_id = kBenchRun,
                              .registered = {memory_}};
    for (const std::string& directory : options_.directories)
        volume.paths.push_back({.path = directory,
                                .size_bytes = options_.bytes_per_path + aio::kHeaderBytes,
                                .files = slot_files_for(directory, options_.rings)});
    volume_ = aio::Volume::open(volume, *executor_);
    while (true) {
        const aio::SlotId slot = volume_->allocate(0);
        if (slot == aio::kNoSlot) break;
        slots_.push_back(slot);
    }
    streams_ = files().size();
}

void Rig::Impl::lay_out(int64_t block_bytes) {
    FERRY_CHECK(block_bytes <= kSlotBytes && kSlotBytes % block_bytes == 0);
    FERRY_CHECK(static_cast<int64_t>(works_.size()) * block_bytes <=
                static_cast<int64_t>(memory_.size()));
    positions_ = Positions(slots_, streams_, block_bytes);
    if (positions_.count() < 2 * std::ssize(works_))
        throw Error(Trouble::usage,
                    {.what = "the files are too small for this block size and depth",
                     .measured = std::to_string(positions_.count()) + " blocks",
                     .limit = std::to_string(2 * works_.size()) + ", twice what is in flight",
                     .remedy = "use larger files, smaller blocks, or a smaller depth"});
    for (Work& work : works_) {
        const auto size = static_cast<size_t>(block_bytes);
        work.operation.buffer = memory_.subspan(work.operation.tag * size, size);
    }
}

Sample Rig::Impl::run(const Load& load) {
    lay_out(load.block_bytes);
    const Direction direction = load.access.direction;
    const int64_t count = positions_.count();
    const bool mixed = direction == Direction::mixed;
    if (load.integrity) {
        if (seals_.block_bytes != load.block_bytes) new_seals(load.block_bytes);
        if (direction != Direction::write) write_sealed(mixed ? count / 2 : count);
    }
    const auto operations = static_cast<int64_t>(works_.size());
    Walk reads(0, mixed ? count / 2 : count, operations, load.access.random);
    Walk writes(mixed ? count / 2 : 0, count, operations, load.access.random);
    const Nanos end = executor_->now() + static_cast<Nanos>(load.seconds * 1e9);
    bool read_next = direction != Direction::write;
    int64_t bytes_left = load.bytes_most;
    const Sample sample = pump(load.integrity, [&](Work& work) {
        if (bytes_left < load.block_bytes || executor_->now() >= end || interrupted()) return false;
        bytes_left -= load.block_bytes;
        const aio::Kind kind = read_next ? aio::Kind::read : aio::Kind::write;
        aim(work, kind, (read_next ? reads : writes).next(work.operation.tag));
        if (mixed) read_next = !read_next;
        return true;
    });
    if (!load.integrity && direction != Direction::read) forget();
    return sample;
}

void Rig::Impl::new_seals(int64_t block_bytes) {
    const auto count = static_cast<size_t>(positions_.count());
    seals_.pieces = static_cast<size_t>(aio::pieces_of(block_bytes));
    seals_.versions.assign(count, 0);
    seals_.sums.assign(count * seals_.pieces, 0);
    seals_.block_bytes = block_bytes;
    seals_.known = 0;
}

// Writes those of the first `count` blocks whose checksums are not known, so that they can be
// verified.
void Rig::Impl::write_sealed(int64_t count) {
    int64_t position = std::min(seals_.known, count);
    pump(true, [&](Work& work) {
        if (position == count || interrupted()) return false;
        aim(work, aio::Kind::write, position++);
        return true;
    });
    seals_.known = std::max(seals_.known, position);
}

void Rig::Impl::aim(Work& work, aio::Kind kind, int64_t position) {
    work.operation.kind = kind;
    work.position = position;
    positions_.place(position, work.operation);
}

// Starts what `next` aims until it says that there is no more, and waits for the last one.
template <class Next>
Sample Rig::Impl::pump(bool integrity, const Next& next) {
    idle_.clear();
    for (Work& work : works_) idle_.push_back(&work);
    Sample sample;
    const double cpu = process_cpu_seconds();
    const Nanos begin = executor_->now();
    bool more = true;
    while (more || idle_.size() < works_.size()) {
        while (more && !idle_.empty()) {
            more = next(*idle_.back());
            if (!more) break;
            Work& work = *idle_.back();
            idle_.pop_back();
            start(work, integrity, sample);
        }
        const bool progress = [&] {
            const bool reaped = reap(sample, integrity);
            return collect_hashed(sample) || reaped;
        }();
        if (!progress && idle_.size() < works_.size()) executor_->wait(kForever);
    }
    sample.seconds = static_cast<double>(executor_->now() - begin) * 1e-9;
    sample.cpu_seconds = process_cpu_seconds() - cpu;
    return sample;
}

void Rig::Impl::start(Work& work, bool integrity, Sample& sample) {
    if (integrity) {
        uint64_t& version = seals_.versions[static_cast<size_t>(work.position)];
        const bool write = work.operation.kind == aio::Kind::write;
        work.version = write ? ++version : version;
        if (write) return hash(work, Step::sealing, sample);
    }
    work.step = Step::moving;
    volume_->submit(work.operation);
}

void Rig::Impl::hash(Work& work, Step step, Sample& sample) {
    work.step = step;
    if (hashers_.empty() || work.operation.buffer.size() < kWorthAThread) {
        hash_now(work);
        return go_on(work, sample);
    }
    work.hashed.store(false, std::memory_order_relaxed);
    hashing_.push_back(&work);
    next_hasher_ = (next_hasher_ + 1) % hashers_.size();
    executor_->post(hashers_[next_hasher_], {.run =
                                                 [](void* context, uint64_t) {
                                                     auto* mine = static_cast<Work*>(context);
                                                     mine->rig->hash_now(*mine);
                                                     mine->rig->executor_->wake();
                                                 },
                                             .context = &work});
}

// Every piece is stamped with what it is before it is sealed: two blocks, or two
// versions of one, never hold the same bytes.
void Rig::Impl::hash_now(Work& work) noexcept {
    const std::span<std::byte> bytes = work.operation.buffer;
    const std::span<uint64_t> sums = seals_.of(work.position);
    if (work.step == Step::sealing) {
        const uint64_t stamp[2] = {static_cast<uint64_t>(work.position), work.version};
        for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(aio::kPieceBytes))
            memcpy(bytes.data() + at, stamp, sizeof stamp);
        aio::seal(bytes, work.version, sums);
    } else {
        work.wrong = aio::verify(bytes, work.version, sums) >= 0;
    }
    work.hashed.store(true, std::memory_order_release);
}

bool Rig::Impl::reap(Sample& sample, bool integrity) {
    bool any = false;
    while (const aio::Operation* operation = volume_->poll()) {
        any = true;
        Work& work = works_[operation->tag];
        if (operation->state == aio::State::failed) throw aio::to_error(*volume_, *operation);
        const bool verify = integrity && operation->kind == aio::Kind::read;
        verify ? hash(work, Step::verifying, sample) : finish(work, sample);
    }
    return any;
}

bool Rig::Impl::collect_hashed(Sample& sample) {
    return std::erase_if(hashing_, [&](Work* work) {
               if (!work->hashed.load(std::memory_order_acquire)) return false;
               go_on(*work, sample);
               return true;
           }) > 0;
}

// With what is hashed: a sealed block is written, a verified one is done.
void Rig::Impl::go_on(Work& work, Sample& sample) {
    if (work.step == Step::sealing) {
        work.step = Step::moving;
        return volume_->submit(work.operation);
    }
    if (work.wrong)
        throw Error(Trouble::io, {.what = "bytes came back wrong: the checksum does not match",
                                  .where = volume_->describe(work.operation.slot) + " + " +
                                           std::to_string(work.operation.offset),
                                  .remedy = "do not trust this drive"});
    finish(work, sample);
}

void Rig::Impl::finish(Work& work, Sample& sample) {
    work.step = Step::idle;
    ++sample.operations;
    (work.operation.kind == aio::Kind::read ? sample.bytes_read : sample.bytes_written) +=
        work.operation.done_bytes;
    idle_.push_back(&work);
}

Rig::Rig(const RigOptions& options, std::span<std::byte> memory)
    : impl_(std::make_unique<Impl>(options, memory)) {}
Rig::~Rig() = default;
Sample Rig::run(const Load& load) { return impl_->run(load); }
void Rig::forget() noexcept { impl_->forget(); }
std::vector<std::string> Rig::files() const { return impl_->files(); }
std::string_view Rig::backend_name() const noexcept { return impl_->backend_name(); }
bool Rig::direct() const noexcept { return impl_->direct(); }

}  // namespace ferry::tools
