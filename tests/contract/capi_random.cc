// Calls of the C ABI in any order, with handles that are closed, of another kind or none, and with
// sizes, types and numbers of every sort: what is wrong is a status, never a crash. Only addresses
// are what they are said to be: those no library can check. Run under the sanitizers too.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <vector>

#include "tests/support/c_abi.h"
#include "tests/support/seeds.h"
#include "tests/support/temporary_directory.h"

namespace ferry {
namespace {

constexpr int64_t kBytes = 64 << 10;  // of a slot, a file and the buffer
constexpr int64_t kElements = 4096;

class Strangers {
public:
    explicit Strangers(uint64_t seed) : seed_(static_cast<uint32_t>(seed)) {
        std::ofstream(file_) << std::string(kBytes, 'x');
    }
    ~Strangers() {
        for (const auto& [store, lease] : leases_) ferry_store_release(store, lease);
        for (ferry_store* one : stores_) EXPECT_EQ(ferry_store_destroy(one), FERRY_OK);
        for (ferry_aio* one : volumes_) EXPECT_EQ(ferry_aio_close(one), FERRY_OK);
        for (ferry_files* one : files_open_) EXPECT_EQ(ferry_files_destroy(one), FERRY_OK);
        for (ferry_pool* one : pools_) EXPECT_EQ(ferry_pool_destroy(one), FERRY_OK);
        for (ferry_team* one : teams_) EXPECT_EQ(ferry_team_destroy(one), FERRY_OK);
        for (ferry_engine* one : engines_) EXPECT_EQ(ferry_engine_destroy(one), FERRY_OK);
        EXPECT_EQ(ferry_log_to(nullptr, nullptr, FERRY_LOG_DEBUG), FERRY_OK);
        EXPECT_EQ(taken_, 0) << "memory of the program's that was not given back";
    }
    Strangers(const Strangers&) = delete;
    Strangers& operator=(const Strangers&) = delete;

    void call() {
        using Call = void (Strangers::*)();
        static constexpr std::array<Call, 8> kCalls{&Strangers::of_teams,   &Strangers::of_pools,
                                                    &Strangers::of_stores,  &Strangers::of_aio,
                                                    &Strangers::of_files,   &Strangers::of_arrays,
                                                    &Strangers::of_engines, &Strangers::of_all};
        (this->*kCalls[below(kCalls.size())])();
    }
    int64_t done = 0, refused = 0;

private:
    uint32_t draw() { return philox({seed_, Purpose::test}, {drawn_++, 0, 0, 0})[0]; }
    size_t below(size_t count) { return draw() % count; }
    bool seldom() { return below(8) == 0; }
    template <class T>
    T one_of(std::initializer_list<T> values) {
        return values.begin()[below(values.size())];
    }
    int64_t size() {
        return seldom() ? one_of<int64_t>({-1, 0, 1, 511, 4095, std::numeric_limits<int64_t>::max(),
                                           std::numeric_limits<int64_t>::min(), int64_t{1} << 50})
                        : one_of<int64_t>({4096, 8192, kBytes});
    }
    int32_t choice(int32_t count) {
        return seldom() ? one_of({-1, count, std::numeric_limits<int32_t>::max()})
                        : static_cast<int32_t>(below(static_cast<size_t>(count)));
    }
    uint32_t number() { return seldom() ? ~0u - draw() % 2 : draw() % 5; }
    void* memory() { return seldom() ? nullptr : static_cast<void*>(buffer_); }

    // A live one, or what was closed, is of another kind, or never was a handle.
    template <class T>
    T* handle_of(const std::vector<T*>& live) {
        if (!live.empty() && !seldom()) return live[below(live.size())];
        static int object;
        if (!strange_.empty() && below(2) == 0)
            return static_cast<T*>(strange_[below(strange_.size())]);
        return static_cast<T*>(one_of<void*>({nullptr, &object, reinterpret_cast<void*>(1)}));
    }
    bool holds(ferry_status status) {
        EXPECT_GE(status, FERRY_OK);
        EXPECT_LE(status, FERRY_BUSY);
        EXPECT_NE(status, FERRY_INTERNAL) << ferry_last_error();
        EXPECT_NE(status, FERRY_POISONED) << ferry_last_error();
        if (status != FERRY_OK && status != FERRY_AGAIN) {
            EXPECT_STRNE(ferry_last_error(), "");
        }
        (status == FERRY_OK ? done : refused)++;
        return status == FERRY_OK;
    }
    template <class T>
    void made(ferry_status status, std::vector<T*>& live, T* const& handle) {
        if (!holds(status)) return;
        live.push_back(handle);
        strange_.push_back(handle);  // of another kind, or closed later
    }
    template <class T, class Close>
    void closed(std::vector<T*>& live, const Close& close) {
        T* const handle = handle_of(live);
        if (holds(close(handle))) std::erase(live, handle);
    }

    // Memory of the program's, which at times has none.
    ferry_allocator allocator() {
        auto made = sized<ferry_allocator>();
        made.context = this;
        made.allocate = [](void* context, int64_t bytes, int64_t alignment) -> void* {
            auto& self = *static_cast<Strangers*>(context);
            if (self.seldom()) return nullptr;
            const int64_t whole = (bytes + alignment - 1) / alignment * alignment;
            ++self.taken_;
            return std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(whole));
        };
        made.release = [](void* context, void* memory, int64_t) {
            --static_cast<Strangers*>(context)->taken_;
            std::free(memory);
        };
        if (seldom()) made.allocate = nullptr;
        if (seldom()) made.size = one_of<size_t>({0, 1});
        return made;
    }

    void of_teams() {
        ferry_team* team = nullptr;
        if (teams_.size() < 2)
            return made(ferry_team_create(one_of({1, 2, -1, 4097}), seldom() ? nullptr : &team),
                        teams_, team);
        closed(teams_, ferry_team_destroy);
    }

    void of_pools() {
        ferry_pool* pool = nullptr;
        void* got = nullptr;
        int64_t bytes = 0;
        auto options = sized<ferry_pool_options>();
        const ferry_allocator memory = allocator();
        switch (below(5)) {
            case 0:
                options.budget_bytes = seldom() ? size() : 8 << 20;
                if (seldom()) options.size = draw();
                if (below(4) == 0) options.allocator = &memory;
                if (pools_.size() < 2) made(ferry_pool_create(&options, &pool), pools_, pool);
                break;
            case 1:
                closed(pools_, ferry_pool_destroy);
                break;
            case 2:
                holds(ferry_pool_reserve(handle_of(pools_), seldom() ? nullptr : "buffer", size(),
                                         seldom() ? nullptr : &got));
                break;
            case 3:
                holds(ferry_pool_reserved_bytes(handle_of(pools_), seldom() ? nullptr : &bytes));
                break;
            default:
                if (seldom()) holds(ferry_pool_seal(handle_of(pools_)));
        }
    }

    void make_store() {
        ferry_store* store = nullptr;
        const ferry_path path = path_at(directory_.path());
        auto options = sized<ferry_store_options>();
        options.paths = seldom() ? nullptr : &path;
        options.path_count = 1;
        options.host_bytes = seldom() ? size() : 4 << 20;
        options.threads = choice(2);
        options.backend = choice(3);
        options.queue_depth = seldom() ? -1 : 0;
        const ferry_allocator memory = allocator();
        if (below(4) == 0) options.allocator = &memory;
        made(ferry_store_create(&options, &store), stores_, store);
        if (options.allocator) with_allocator_.push_back(store);
    }
    // What is abandoned stays until the process ends: a few, and none with the program's memory.
    void close_store() {
        ferry_store* const store = handle_of(stores_);
        if (abandoned_ == 3 || !seldom() || std::ranges::count(with_allocator_, store) > 0) {
            if (holds(ferry_store_destroy(store))) std::erase(stores_, store);
        } else if (holds(ferry_store_abandon(store))) {
            ++abandoned_;
            std::erase(stores_, store);
            std::erase_if(leases_, [&](const auto& lease) { return lease.first == store; });
        }
    }
    void lease() {
        ferry_store* const store = handle_of(stores_);
        uint64_t lease = 0;
        void* bytes = nullptr;
        if (leases_.size() < 3 && below(2) == 0) {
            if (holds(ferry_store_acquire(store, number(), choice(3), &lease, &bytes)))
                leases_.emplace_back(store, lease);
            return;
        }
        const auto at = leases_.empty() ? leases_.end() : leases_.begin();
        const uint64_t given = at == leases_.end() || seldom() ? draw() : at->second;
        if (holds(ferry_store_release(at == leases_.end() ? store : at->first, given)) &&
            at != leases_.end() && given == at->second)
            leases_.erase(at);
    }
    void of_stores() {
        uint32_t object = 0;
        auto stats = sized<ferry_store_stats>();
        const std::array<uint32_t, 3> objects{0, number(), number()};
        switch (below(10)) {
            case 0:
                return stores_.size() < 2 ? make_store() : close_store();
            case 1:
            case 2:
                holds(ferry_store_register(handle_of(stores_), size(), choice(2),
                                           seldom() ? nullptr : &object));
                break;
            case 3:
                holds(ferry_store_open(handle_of(stores_)));
                break;
            case 4:
                holds(ferry_store_prefetch(handle_of(stores_), seldom() ? nullptr : objects.data(),
                                           below(4)));
                break;
            case 5:
                holds(ferry_store_revert(handle_of(stores_), number()));
                break;
            case 6:
                if (seldom()) stats.size = draw();
                holds(ferry_store_get_stats(handle_of(stores_), &stats));
                break;
            case 7:
                holds(below(2) ? ferry_store_check(handle_of(stores_))
                               : ferry_store_flush(handle_of(stores_)));
                break;
            default:
                lease();
        }
    }

    void open_volume() {
        ferry_aio* aio = nullptr;
        const ferry_path path = path_at(volumes_directory_.path());
        auto slots = sized<ferry_slot_class>();
        slots.slot_bytes = seldom() ? size() : kBytes;
        slots.slots = 4;
        auto options = sized<ferry_aio_options>();
        options.paths = &path;
        options.path_count = seldom() ? 0 : 1;
        options.classes = seldom() ? nullptr : &slots;
        options.class_count = 1;
        options.backend = choice(3);
        options.operations_max = seldom() ? -5 : 4;
        // One volume has the directory at a time; slots of 2^50 bytes would fill the drive.
        if (volumes_.empty() && slots.slot_bytes <= kBytes)
            made(ferry_aio_open(&options, &aio), volumes_, aio);
    }
    void facts_of(ferry_aio* aio) {
        auto stats = sized<ferry_path_stats>();
        int64_t bytes = 0;
        int32_t transfers = 0;
        if (seldom()) stats.size = draw();
        holds(ferry_aio_alignment(aio, seldom() ? nullptr : &bytes));
        holds(ferry_aio_slot_bytes(aio, seldom() ? choice(1) : 0, seldom() ? nullptr : &bytes));
        holds(ferry_aio_in_flight(aio, seldom() ? nullptr : &transfers));
        holds(ferry_aio_descriptor(aio, seldom() ? nullptr : &transfers));
        holds(ferry_aio_stats(aio, seldom() ? SIZE_MAX : 0, &stats));
    }
    void of_aio() {
        ferry_aio* const aio = handle_of(volumes_);
        auto completion = sized<ferry_completion>();
        uint32_t slot = 0;
        const int64_t bytes = size(), offset = seldom() ? size() : 0;
        switch (below(9)) {
            case 0:
                return below(2) ? open_volume() : closed(volumes_, ferry_aio_close);
            case 1:
                holds(
                    ferry_aio_allocate(aio, seldom() ? choice(1) : 0, seldom() ? nullptr : &slot));
                break;
            case 2:
                holds(ferry_aio_free(aio, number()));
                break;
            case 3:
                holds(ferry_aio_read(aio, number(), offset, memory(), bytes, choice(3), 1));
                break;
            case 4:
                holds(ferry_aio_write(aio, number(), offset, memory(), bytes, choice(3), 2));
                break;
            case 5:
                holds(ferry_aio_wait(aio, 1, seldom() ? nullptr : &completion));
                break;
            case 6:
                holds(ferry_aio_poll(aio, &completion));
                break;
            case 7:
                facts_of(aio);
                break;
            default:
                holds(seldom() ? ferry_aio_cancel(aio) : ferry_aio_flush(aio));
        }
    }

    void of_files() {
        ferry_files* const files = handle_of(files_open_);
        ferry_files* made_files = nullptr;
        auto options = sized<ferry_files_options>();
        auto completion = sized<ferry_completion>();
        uint32_t file = 0;
        int64_t bytes = size();
        int32_t descriptor = -1;
        switch (below(8)) {
            case 0:
                if (files_open_.size() >= 2) return closed(files_open_, ferry_files_destroy);
                options.backend = choice(3);
                options.block_bytes = seldom() ? size() : 0;
                options.files_max = 3;
                return made(ferry_files_create(&options, &made_files), files_open_, made_files);
            case 1:
            case 2:
                holds(below(4) == 0
                          ? ferry_files_open_descriptor(files, one_of({-1, 1 << 20}), &file)
                          : ferry_files_open(files,
                                             seldom()   ? nullptr
                                             : seldom() ? ""
                                                        : file_.c_str(),
                                             choice(2), seldom() ? nullptr : &file));
                break;
            case 3:
                holds(ferry_files_read(files, number(), seldom() ? size() : 0, memory(), bytes,
                                       choice(3), 3));
                break;
            case 4:  // more than the buffer has is not for a library to know
                bytes = std::min(bytes, kBytes);
                holds(ferry_files_write(files, number(), 0, memory(), bytes, choice(3), 4));
                break;
            case 5:
                holds(ferry_files_wait(files, 1, seldom() ? nullptr : &completion));
                break;
            case 6:
                holds(seldom() ? ferry_files_cancel(files) : ferry_files_flush(files, number()));
                holds(ferry_files_descriptor(files, seldom() ? nullptr : &descriptor));
                break;
            default:
                holds(seldom() ? ferry_files_close(files, number())
                               : ferry_files_size(files, number(), &bytes));
        }
    }

    // An engine of the smallest sort, fed by hand or by a callback that does not always do it.
    void make_engine() {
        static constexpr const char* kConfig =
            R"({"model": {"hidden": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8,
                          "intermediate": 16, "vocab": 32},
                "batch": {"sequence": 8, "micro_batch": 1, "micro_batches": 2},
                "evaluate": {"micro_batches": 1}, "steps": 100, "threads": 1})";
        ferry_engine* engine = nullptr;
        auto options = sized<ferry_engine_options>();
        const ferry_allocator memory = allocator();
        const char* const override = seldom() ? nullptr : one_of({"seed=1", "seed=-1", "nothing"});
        const std::array<char, 128> id{};
        options.config_json = seldom() ? one_of({"", "[]", "{"}) : kConfig;
        options.overrides = &override;
        options.override_count = below(4) == 0 ? 1 : 0;
        options.fed = choice(2);
        if (below(2) == 0) options.load = load_some;
        options.load_context = this;
        options.progress = [](void* context, const char* stage, int64_t bytes, int64_t of) {
            EXPECT_TRUE(context && stage && bytes <= of);
            // None yet while one is made.
            for (ferry_engine* one : static_cast<Strangers*>(context)->engines_)
                EXPECT_EQ(ferry_engine_destroy(one), FERRY_BUSY);
        };
        options.progress_context = this;
        if (below(2) == 0) options.allocator = &memory;
        if (seldom()) options.gpu = choice(2);
        if (seldom()) options.nccl_unique_id = id.data();
        if (seldom()) options.rank = choice(2), options.ranks = choice(3);
        made(ferry_engine_create(&options, &engine), engines_, engine);
    }
    static int64_t load_some(void* context, int64_t step, int64_t sequences, int64_t sequence,
                             int32_t* tokens, int32_t* targets) {
        auto& self = *static_cast<Strangers*>(context);
        EXPECT_GE(step, 0);
        for (int64_t i = 0; i < sequences * sequence; ++i)
            tokens[i] = targets[i] = static_cast<int32_t>(self.below(32));
        if (self.seldom()) tokens[0] = self.one_of({-1, 32, std::numeric_limits<int32_t>::max()});
        if (self.seldom() && !self.engines_.empty()) {
            EXPECT_EQ(ferry_engine_last_step(self.engines_[0], nullptr), FERRY_BUSY);
        }
        return self.seldom() ? self.size() : sequences;
    }
    void feed() {
        std::array<int32_t, 16> tokens{}, targets{};
        for (size_t i = 0; i < tokens.size(); ++i)
            tokens[i] = targets[i] = static_cast<int32_t>(below(32));
        if (seldom()) targets[3] = one_of({-1, -2, 32});
        auto batch = sized<ferry_batch>();
        batch.evaluation = below(4) == 0 ? choice(2) : 0;
        batch.sequences = seldom() ? size() : batch.evaluation == 1 ? 1 : 2;
        batch.sequence = seldom() ? size() : 8;
        batch.tokens = seldom() ? nullptr : tokens.data();
        batch.targets = seldom() ? nullptr : targets.data();
        holds(ferry_engine_feed(handle_of(engines_), seldom() ? nullptr : &batch));
    }
    // Into a place of its own, one that is taken, a file, or none.
    void keep(ferry_engine* engine) {
        const std::string fresh = directory_.path() + "/kept" + std::to_string(draw());
        const char* const place =
            one_of<const char*>({fresh.c_str(), directory_.path().c_str(), file_.c_str(), "",
                                 "/proc/no such", nullptr});
        holds(below(2) ? ferry_engine_save(engine, place)
                       : ferry_engine_export(engine, place, choice(4) - 1));
    }
    void of_engines() {
        ferry_engine* const engine = handle_of(engines_);
        auto evaluation = sized<ferry_evaluation>();
        auto report = sized<ferry_run_report>();
        int64_t one = 0, two = 0;
        uint64_t hash = 0;
        switch (below(12)) {
            case 0:
                return engines_.empty() ? make_engine() : closed(engines_, ferry_engine_destroy);
            case 1:
            case 2:
            case 3:
                return feed();
            case 4:
            case 5:
                holds(ferry_engine_step(engine, nullptr));
                break;
            case 6:
                holds(ferry_engine_evaluate(engine, seldom() ? nullptr : &evaluation));
                break;
            case 7:
                holds(ferry_engine_batch_shape(engine, choice(2), &one, seldom() ? nullptr : &two));
                break;
            case 8:
                holds(ferry_engine_report(engine, &report));
                break;
            case 9:
                holds(ferry_engine_last_step(engine, seldom() ? nullptr : &one));
                break;
            case 10:
                if (below(2) == 0) keep(engine);
                break;
            default:
                holds(ferry_engine_state_hash(engine, seldom() ? nullptr : &hash));
        }
    }

    // Of the process, and without a handle.
    void of_all() {
        EXPECT_STRNE(ferry_status_name(choice(20)), "");
        EXPECT_GT(ferry_abi_version(), 0);
        EXPECT_STRNE(ferry_version(), "");
        if (seldom()) holds(ferry_on_stuck(nullptr, nullptr));
        holds(ferry_log_to_stderr(one_of({-1, int32_t{FERRY_LOG_BUG}, FERRY_LOG_BUG + 1})));
        const auto listen = [](void*, int32_t, const char* text) {
            EXPECT_EQ(ferry_log_to(nullptr, nullptr, FERRY_LOG_DEBUG), FERRY_BUSY) << text;
        };
        holds(ferry_log_to(seldom() ? nullptr : +listen, nullptr, choice(4)));
    }

    // Of arrays that hold kElements of the largest type.
    void of_arrays() {
        const auto array = [&](size_t n) { return seldom() ? nullptr : arrays_[n].data(); };
        auto hyper = sized<ferry_hyper>();
        if (!holds(ferry_hyper_default(choice(5), &hyper))) return;
        if (seldom()) hyper.beta1 = one_of({1.0, -1.0, std::nan("")});
        if (seldom()) hyper.size = draw();
        auto update = sized<ferry_update>();
        update.count = one_of<int64_t>({0, 1, 255, 256, kElements});
        if (seldom()) update.count = one_of<int64_t>({-1, std::numeric_limits<int64_t>::max()});
        update.element = seldom() ? size() : 0;
        update.gradient = array(0);
        update.p = array(1);
        if (below(2) == 0) update.p_in = array(1);
        update.m = array(2), update.v = array(3), update.weight = array(4);
        if (seldom()) update.v = array(1 + below(4));  // one that another has
        update.m_scale = array(5), update.v_scale = array(6);
        if (below(4) == 0) update.low = reinterpret_cast<uint16_t*>(array(7)), update.p = nullptr;
        update.gradient_type = choice(3), update.weight_type = choice(3);
        update.moment_type = below(2) ? choice(4) : FERRY_F32;
        ferry_team* const team = below(2) ? nullptr : handle_of(teams_);
        holds(ferry_optim_update(team, &hyper, seldom() ? size() : 1, 1, &update));
        double sum = 0;
        holds(ferry_optim_leaf_norms(team, array(0), choice(3),
                                     std::min<int64_t>(update.count, kElements), array(5)));
        holds(ferry_optim_add_leaves(array(5), one_of<int64_t>({-1, 0, 1}),
                                     seldom() ? nullptr : &sum));
        holds(ferry_optim_moment_shares(choice(5), choice(2), array(6)));
        int32_t moments = 0;
        float initial = 0;
        holds(ferry_optim_moments(&hyper, seldom() ? nullptr : &moments, &initial));
        const double clipped = ferry_optim_clip_factor(sum, one_of({-1.0, 0.0, 1.0, std::nan("")}));
        EXPECT_TRUE(!(clipped < 0 || clipped > 1));
        // Arrays of no element: those of a GPU cannot be made up.
        update.count = one_of<int64_t>({0, -1, std::numeric_limits<int64_t>::max()});
        holds(ferry_optim_update_cuda(&hyper, seldom() ? size() : 1, 1, &update, nullptr));
        holds(ferry_optim_recast_cuda(array(1), update.count, choice(3), array(4), nullptr));
        holds(ferry_optim_leaf_norms_cuda(array(0), choice(3), std::min<int64_t>(update.count, 0),
                                          array(5), nullptr));
        holds(ferry_optim_recast(array(1), std::min<int64_t>(update.count, kElements), choice(3),
                                 array(4)));
        for (auto& values : arrays_) values.fill(0.5f);
    }

    const uint32_t seed_;
    uint32_t drawn_ = 0;
    TemporaryDirectory directory_, volumes_directory_;
    const std::string file_ = directory_.path() + "/file";
    alignas(4096) std::byte buffer_[kBytes]{};
    std::array<std::array<float, static_cast<size_t>(kElements)>, 8> arrays_{};
    std::vector<void*> strange_;
    std::vector<ferry_team*> teams_;
    std::vector<ferry_pool*> pools_;
    std::vector<ferry_store*> stores_;
    std::vector<ferry_aio*> volumes_;
    std::vector<ferry_files*> files_open_;
    std::vector<ferry_engine*> engines_;
    int64_t taken_ = 0;  // pieces of the program's memory
    std::vector<std::pair<ferry_store*, uint64_t>> leases_;
    std::vector<ferry_store*> with_allocator_;
    int abandoned_ = 0;
};

TEST(CapiRandom, WhatIsWrongIsAStatus) {
    int64_t done = 0, refused = 0;
    Seeds seeds(10);
    do {
        Strangers strangers(seeds.now());
        for (int n = 0; n < 500; ++n) strangers.call();
        done += strangers.done, refused += strangers.refused;
        if (testing::Test::HasFailure()) FAIL() << "seed " << seeds.now();
    } while (seeds.next());
    if (!seeds.replays()) {
        EXPECT_GT(std::min(done, refused), 100 * seeds.count());
    }
}

}  // namespace
}  // namespace ferry
