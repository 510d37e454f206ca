// The engine through the C ABI: the numbers of the engine below it, batches that are fed, memory
// and progress of the program's, and what is refused.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "data/tokens.h"
#include "ferry/train.h"
#include "tests/support/c_abi.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tiny_run.h"

namespace ferry::train {
namespace {

class CapiEngine : public testing::Test {
protected:
    std::string config() const {
        return R"({"model": {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8,
                             "intermediate": 32, "vocab": 32},
                   "data": {"tokens": ")" +
               data_.tokens_path() + R"(", "held_back": 0.2},
                   "batch": {"sequence": 8, "micro_batch": 2, "micro_batches": 2},
                   "optimizer": {"lr": 0.003, "weight_decay": 0.1}, "clip_norm": 0.98,
                   "evaluate": {"micro_batches": 2}, "seed": 3, "steps": 6, "threads": 1})";
    }
    ferry_status create(const std::vector<const char*>& overrides = {},
                        const char* checkpoint = nullptr) {
        const std::string text = config();
        auto options = sized<ferry_engine_options>();
        options.config_json = text.c_str();
        options.overrides = overrides.data();
        options.override_count = overrides.size();
        options.checkpoint = checkpoint;
        return ferry_engine_create(&options, &engine_);
    }
    ferry_step_report step() {
        auto report = sized<ferry_step_report>();
        EXPECT_EQ(ferry_engine_step(engine_, &report), FERRY_OK) << ferry_last_error();
        return report;
    }
    ~CapiEngine() override {
        if (engine_) {
            EXPECT_EQ(ferry_engine_destroy(engine_), FERRY_OK) << ferry_last_error();
        }
    }

    const TinyData data_;
    TemporaryDirectory directory_;
    ferry_engine* engine_ = nullptr;
};

TEST_F(CapiEngine, TakesTheStepsOfTheEngineBelow) {
    const auto executor = make_thread_executor();
    const auto below =
        Engine::make(parse_config(config(), "config", {}), {.executor = executor.get()});
    ASSERT_DONE(create());
    for (int64_t i = 1; i <= 3; ++i) {
        const StepReport expected = below->step();
        const ferry_step_report report = step();
        EXPECT_EQ(report.step, i);
        EXPECT_EQ(report.loss, expected.loss);
        EXPECT_EQ(report.gradient_norm, expected.gradient_norm);
        EXPECT_EQ(report.clip_factor, expected.clip_factor);
        EXPECT_EQ(report.tokens, expected.tokens);
    }
    auto evaluation = sized<ferry_evaluation>();
    ASSERT_DONE(ferry_engine_evaluate(engine_, &evaluation));
    EXPECT_EQ(evaluation.loss, below->evaluate().loss);
    uint64_t hash = 0;
    ASSERT_DONE(ferry_engine_state_hash(engine_, &hash));
    EXPECT_EQ(hash, below->state_hash());
    int64_t last = 0;
    ASSERT_DONE(ferry_engine_last_step(engine_, &last));
    EXPECT_EQ(last, 3);
}

TEST_F(CapiEngine, ACheckpointGoesOnWithTheSameBits) {
    ASSERT_DONE(create());
    step(), step();
    const std::string directory = directory_.path() + "/saved";
    ASSERT_DONE(ferry_engine_save(engine_, directory.c_str()));
    const double loss = step().loss;
    EXPECT_REFUSED(ferry_engine_save(engine_, nullptr), FERRY_USAGE, "directory is NULL");
    // What to do is said of this call, not of a configuration that it does not read.
    EXPECT_REFUSED(ferry_engine_save(engine_, "/proc/none"), FERRY_USAGE,
                   "call it with another directory");
    EXPECT_EQ(ferry_engine_destroy(std::exchange(engine_, nullptr)), FERRY_OK);

    const std::string nvme = R"(budgets.nvme=[{"path": ")" + directory_.path() + R"("}])";
    const std::string checkpoint = directory + "/step-00000002";
    ASSERT_DONE(create({nvme.c_str(), "swap.state_on_nvme=1"}, checkpoint.c_str()));
    int64_t last = 0;
    ASSERT_DONE(ferry_engine_last_step(engine_, &last));
    EXPECT_EQ(last, 2);
    EXPECT_EQ(step().loss, loss);
    EXPECT_EQ(ferry_engine_destroy(std::exchange(engine_, nullptr)), FERRY_OK);
    EXPECT_REFUSED(create({}, (directory + "/step-00000009").c_str()), FERRY_USAGE,
                   "step-00000009");
    EXPECT_REFUSED(create({"optimizer.lr=0.5"}, checkpoint.c_str()), FERRY_USAGE, "optimizer");
}

TEST_F(CapiEngine, OverridesMoveItsStateAndNotItsNumbers) {
    ASSERT_DONE(create());
    const double loss = (step(), step().loss);
    EXPECT_EQ(ferry_engine_destroy(engine_), FERRY_OK);
    engine_ = nullptr;
    const std::string nvme = R"(budgets.nvme=[{"path": ")" + directory_.path() + R"("}])";
    ASSERT_DONE(create({nvme.c_str(), "swap.state_on_nvme=1"}));
    EXPECT_EQ((step(), step().loss), loss);
    ASSERT_DONE(ferry_engine_step(engine_, nullptr));
    auto report = sized<ferry_run_report>();
    ASSERT_DONE(ferry_engine_report(engine_, &report));
    EXPECT_EQ(report.steps, 3);
    EXPECT_GT(report.nvme_bytes_written, 0);
    EXPECT_GT(report.nvme_bytes, 0);
}

TEST_F(CapiEngine, ExportsAndGoesOn) {
    ASSERT_DONE(create());
    step();
    const std::string out = directory_ / "out";
    ASSERT_DONE(ferry_engine_export(engine_, out.c_str(), FERRY_TYPE_OF_RUN));
    EXPECT_TRUE(directory_.has("out/config.json"));
    EXPECT_REFUSED(ferry_engine_export(engine_, out.c_str(), FERRY_TYPE_OF_RUN), FERRY_USAGE, out);
    EXPECT_REFUSED(ferry_engine_export(engine_, nullptr, 0), FERRY_USAGE, "directory is NULL");
    EXPECT_REFUSED(ferry_engine_export(engine_, "x", -2), FERRY_USAGE, "type");
    EXPECT_EQ(step().step, 2);
}

TEST_F(CapiEngine, RefusesConfigurations) {
    EXPECT_REFUSED(create({"optimizer.lrr=1"}), FERRY_USAGE, "lrr");
    EXPECT_REFUSED(create({"budgets.host=1KiB"}), FERRY_DOES_NOT_FIT, "");
    EXPECT_REFUSED(create({nullptr}), FERRY_USAGE, "overrides is NULL");
    auto options = sized<ferry_engine_options>();
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "neither");
    options.config_json = "{";
    EXPECT_REFUSED(ferry_engine_create(&options, nullptr), FERRY_USAGE, "engine is NULL");
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "config_json");
    options.config_file = "/nowhere.json";
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "both");
    options.config_json = nullptr;
    EXPECT_NE(ferry_engine_create(&options, &engine_), FERRY_OK);
    EXPECT_NE(std::string(ferry_last_error()).find("/nowhere.json"), std::string::npos);
    options.override_count = SIZE_MAX;
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "override_count");
    options.override_count = 1;
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "overrides is NULL");
    EXPECT_EQ(engine_, nullptr);
}

TEST_F(CapiEngine, RefusesReports) {
    ASSERT_DONE(create({"evaluate.micro_batches=0"}));
    auto evaluation = sized<ferry_evaluation>();
    EXPECT_REFUSED(ferry_engine_evaluate(engine_, &evaluation), FERRY_USAGE, "no evaluation");
    ferry_step_report report{};
    EXPECT_REFUSED(ferry_engine_step(engine_, &report), FERRY_USAGE, "size is wrong");
    EXPECT_REFUSED(ferry_engine_report(engine_, nullptr), FERRY_USAGE, "report is NULL");
    EXPECT_REFUSED(ferry_engine_state_hash(engine_, nullptr), FERRY_USAGE, "hash is NULL");
    EXPECT_EQ(step().step, 1) << "a refused step is none";
}

// ---------------------------------------------------------------- batches of the program's

// What the file's loader gives, for a program that feeds it; or what it is told to do instead.
struct FromFile {
    explicit FromFile(const std::string& path)
        : loader([&path] {
              TokenLoader::Options options{{.sequence = 8,
                                            .micro_batch = 2,
                                            .micro_batches = 2,
                                            .evaluation_micro_batches = 2,
                                            .vocab = 32}};
              options.path = path;
              options.held_back = 0.2;
              options.seed = 3;
              return options;
          }()) {}

    static int64_t load(void* context, int64_t step, int64_t sequences, int64_t sequence,
                        int32_t* tokens, int32_t* targets) {
        auto& self = *static_cast<FromFile*>(context);
        self.asked.push_back(step);
        EXPECT_EQ(sequences, 4);
        EXPECT_EQ(sequence, 8);
        for (int64_t i = 0; i < 2; ++i) {
            const MicroBatch out{.tokens = {tokens + i * 16, 16},
                                 .targets = {targets + i * 16, 16}};
            step > 0 ? self.loader.fill(step, i, out) : self.loader.fill_evaluation(i, out);
        }
        if (self.spoil) tokens[9] = *self.spoil;
        if (self.calls) self.within = ferry_engine_step(self.calls, nullptr);
        return std::exchange(self.answer, std::nullopt).value_or(sequences);
    }

    TokenLoader loader;
    std::vector<int64_t> asked{};
    std::optional<int64_t> answer{};  // in place of all sequences, once
    std::optional<int32_t> spoil{};
    ferry_engine* calls = nullptr;
    ferry_status within = FERRY_OK;
};

class CapiFed : public CapiEngine {
protected:
    // Its configuration names no token file.
    ferry_engine_options fed(const std::string& text) {
        auto options = sized<ferry_engine_options>();
        options.config_json = text.c_str();
        return options;
    }
    std::string without_tokens() const {
        std::string text = config();
        const size_t at = text.find("\"data\""), end = text.find("\"batch\"");
        return text.erase(at, end - at);
    }
    // Of the run that reads the same from its file.
    std::vector<double> expected(uint64_t& hash) {
        EXPECT_EQ(create(), FERRY_OK) << ferry_last_error();
        std::vector<double> losses{step().loss, step().loss, evaluate(), step().loss};
        EXPECT_EQ(ferry_engine_state_hash(engine_, &hash), FERRY_OK);
        EXPECT_EQ(ferry_engine_destroy(std::exchange(engine_, nullptr)), FERRY_OK);
        return losses;
    }
    double evaluate() {
        auto evaluation = sized<ferry_evaluation>();
        EXPECT_EQ(ferry_engine_evaluate(engine_, &evaluation), FERRY_OK) << ferry_last_error();
        return evaluation.loss;
    }
    ferry_status feed(FromFile& from, int64_t step) {
        std::vector<int32_t> tokens(32), targets(32);
        FromFile::load(&from, step, 4, 8, tokens.data(), targets.data());
        auto batch = sized<ferry_batch>();
        batch.tokens = tokens.data();
        batch.targets = targets.data();
        batch.sequences = 4;
        batch.sequence = 8;
        batch.evaluation = step == 0;
        return ferry_engine_feed(engine_, &batch);
    }
    FromFile from_{data_.tokens_path()};
};

TEST_F(CapiFed, ByACallbackGivesTheBitsOfTheFile) {
    uint64_t expected_hash = 0, hash = 0;
    const std::vector<double> expected = this->expected(expected_hash);
    const std::string text = without_tokens();
    auto options = fed(text);
    options.load = FromFile::load;
    options.load_context = &from_;
    ASSERT_DONE(ferry_engine_create(&options, &engine_));
    EXPECT_EQ((std::vector<double>{step().loss, step().loss, evaluate(), step().loss}), expected);
    ASSERT_DONE(ferry_engine_state_hash(engine_, &hash));
    EXPECT_EQ(hash, expected_hash);
    EXPECT_EQ(from_.asked, (std::vector<int64_t>{1, 2, 0, 3}));
    EXPECT_REFUSED(feed(from_, 4), FERRY_USAGE, "has a callback");
}

TEST_F(CapiFed, FromMemoryGivesTheBitsOfTheFile) {
    uint64_t expected_hash = 0, hash = 0;
    const std::vector<double> expected = this->expected(expected_hash);
    const std::string text = without_tokens();
    auto options = fed(text);
    options.fed = 1;
    ASSERT_DONE(ferry_engine_create(&options, &engine_));
    int64_t sequences = 0, sequence = 0;
    for (const int32_t evaluation : {0, 1}) {
        ASSERT_DONE(ferry_engine_batch_shape(engine_, evaluation, &sequences, &sequence));
        EXPECT_EQ(std::pair(sequences, sequence), (std::pair<int64_t, int64_t>(4, 8)));
    }
    ASSERT_DONE(feed(from_, 0));
    std::vector<double> losses;
    for (int64_t i = 1; i <= 3; ++i) {
        ASSERT_DONE(feed(from_, 7));  // replaced before it is used
        ASSERT_DONE(feed(from_, i));
        losses.push_back(step().loss);
        if (i == 2) losses.push_back(evaluate());
    }
    EXPECT_EQ(losses, expected);
    ASSERT_DONE(ferry_engine_state_hash(engine_, &hash));
    EXPECT_EQ(hash, expected_hash);
}

TEST_F(CapiFed, BatchesThatCannotBeHadLeaveItAsItWas) {
    uint64_t hash = 0;
    const double first = expected(hash).front();
    const std::string text = without_tokens();
    auto options = fed(text);
    options.load = FromFile::load;
    options.load_context = &from_;
    ASSERT_DONE(ferry_engine_create(&options, &engine_));
    from_.answer = 3;
    EXPECT_REFUSED(ferry_engine_step(engine_, nullptr), FERRY_USAGE, "step 1");
    EXPECT_NE(std::string(ferry_last_error()).find("3 sequences"), std::string::npos);
    from_.answer = -5;
    EXPECT_REFUSED(ferry_engine_step(engine_, nullptr), FERRY_USAGE, "it returned -5");
    auto evaluation = sized<ferry_evaluation>();
    from_.answer = 0;
    EXPECT_REFUSED(ferry_engine_evaluate(engine_, &evaluation), FERRY_USAGE, "evaluation");
    for (const int32_t token : {-1, 32, INT32_MIN}) {
        from_.spoil = token;
        EXPECT_REFUSED(ferry_engine_step(engine_, nullptr), FERRY_USAGE, "sequence 1, position 1");
    }
    from_.spoil.reset();
    from_.calls = engine_;
    int64_t last = -1;
    ASSERT_DONE(ferry_engine_last_step(engine_, &last));
    EXPECT_EQ(last, 0);
    EXPECT_EQ(step().loss, first);
    EXPECT_EQ(from_.within, FERRY_BUSY) << "a call from within its own callback";
}

TEST_F(CapiFed, RefusesBatches) {
    const std::string text = without_tokens();
    auto options = fed(text);
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "data.tokens");
    options.fed = 2;
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "fed");
    options.fed = 1;
    const char* const isolated = "data.isolate_documents=true";
    options.overrides = &isolated;
    options.override_count = 1;
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "data.isolate_documents");
    options.override_count = 0;
    ASSERT_DONE(ferry_engine_create(&options, &engine_));
    EXPECT_REFUSED(ferry_engine_step(engine_, nullptr), FERRY_USAGE, "no batch was fed");
    const std::vector<int32_t> ids(32, 1);
    const auto refused = [&](const auto& change, const char* says) {
        auto batch = sized<ferry_batch>();
        batch.tokens = batch.targets = ids.data();
        batch.sequences = 4, batch.sequence = 8;
        change(batch);
        EXPECT_REFUSED(ferry_engine_feed(engine_, &batch), FERRY_USAGE, says);
    };
    refused([](auto& batch) { batch.tokens = nullptr; }, "batch->tokens is NULL");
    refused([](auto& batch) { batch.targets = nullptr; }, "batch->targets is NULL");
    refused([](auto& batch) { batch.sequences = 3; }, "3 sequences of 8");
    refused([](auto& batch) { batch.sequence = INT64_MAX; }, "another shape");
    refused([](auto& batch) { batch.evaluation = 2; }, "batch->evaluation");
    refused([](auto& batch) { batch.size = 8; }, "size is wrong");
    EXPECT_REFUSED(ferry_engine_feed(engine_, nullptr), FERRY_USAGE, "batch is NULL");
    int64_t number = 0;
    EXPECT_REFUSED(ferry_engine_batch_shape(engine_, 2, &number, &number), FERRY_USAGE,
                   "evaluation");
    EXPECT_REFUSED(ferry_engine_batch_shape(engine_, 0, nullptr, &number), FERRY_USAGE,
                   "sequences is NULL");
    ASSERT_EQ(ferry_engine_destroy(std::exchange(engine_, nullptr)), FERRY_OK);
    ASSERT_DONE(create());
    auto batch = sized<ferry_batch>();
    EXPECT_REFUSED(ferry_engine_feed(engine_, &batch), FERRY_USAGE, "data.tokens");
}

// ---------------------------------------------------------------- memory, progress, ranks

// Memory that remembers what of it is out.
struct Memory {
    static void* allocate(void* context, int64_t bytes, int64_t alignment) {
        auto& self = *static_cast<Memory*>(context);
        if (self.none) return nullptr;
        const auto size = static_cast<size_t>((bytes + alignment - 1) / alignment * alignment);
        auto* const memory =
            static_cast<char*>(std::aligned_alloc(static_cast<size_t>(alignment), size));
        memset(memory, 0x5a, size);
        self.out[memory + self.past] = bytes;
        ++self.given;
        return memory + self.past;
    }
    static void release(void* context, void* memory, int64_t bytes) {
        auto& self = *static_cast<Memory*>(context);
        EXPECT_EQ(self.out[memory], bytes);
        self.out.erase(memory);
        std::free(static_cast<char*>(memory) - self.past);
    }
    ferry_allocator allocator() {
        auto made = sized<ferry_allocator>();
        made.context = this;
        made.allocate = allocate;
        made.release = release;
        return made;
    }
    std::map<void*, int64_t> out{};
    int64_t given = 0, past = 0;
    bool none = false;
};

TEST_F(CapiFed, HoldsItsStateInTheProgramsMemory) {
    uint64_t expected_hash = 0, hash = 0;
    const std::vector<double> expected = this->expected(expected_hash);
    Memory memory;
    const ferry_allocator allocator = memory.allocator();
    const std::string text = config();
    auto options = fed(text);
    options.allocator = &allocator;
    memory.none = true;
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_DOES_NOT_FIT,
                   "the program's allocator");
    memory.none = false;
    memory.past = 64;
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "not aligned");
    EXPECT_TRUE(memory.out.empty()) << "given back after a call that failed";
    memory.past = 0;
    ASSERT_DONE(ferry_engine_create(&options, &engine_));
    EXPECT_FALSE(memory.out.empty());
    EXPECT_EQ((std::vector<double>{step().loss, step().loss, evaluate(), step().loss}), expected);
    ASSERT_DONE(ferry_engine_state_hash(engine_, &hash));
    EXPECT_EQ(hash, expected_hash);
    ASSERT_EQ(ferry_engine_destroy(std::exchange(engine_, nullptr)), FERRY_OK);
    EXPECT_TRUE(memory.out.empty());
}

TEST_F(CapiFed, TellsItsProgress) {
    struct Told {
        std::string stage;
        int64_t bytes, of;
    };
    std::vector<Told> told;
    const std::string text = config();
    auto options = fed(text);
    options.progress_context = &told;
    options.progress = [](void* context, const char* stage, int64_t bytes, int64_t of) {
        static_cast<std::vector<Told>*>(context)->push_back({stage, bytes, of});
    };
    ASSERT_DONE(ferry_engine_create(&options, &engine_));
    const auto ended = [&](const char* stage) {
        return std::ranges::count_if(
            told, [&](const Told& one) { return one.stage == stage && one.bytes == one.of; });
    };
    EXPECT_EQ(ended("first contents"), 1);
    step();
    ASSERT_DONE(ferry_engine_save(engine_, (directory_ / "saved").c_str()));
    EXPECT_EQ(ended("checkpoint"), 1);
    ASSERT_DONE(ferry_engine_export(engine_, (directory_ / "model").c_str(), FERRY_F32));
    EXPECT_GE(ended("export"), 1);
    for (const Told& one : told) EXPECT_LE(one.bytes, one.of) << one.stage;
}

// Told by the thread that writes, while this one waits in ferry_engine_save.
TEST_F(CapiFed, ProgressThatCallsItsEngineIsRefused) {
    struct Calls {
        ferry_engine* engine = nullptr;
        const std::thread::id program = std::this_thread::get_id();
        std::vector<ferry_status> answers{};
        bool elsewhere = false;
    } calls;
    const std::string text = config();
    auto options = fed(text);
    options.progress_context = &calls;
    options.progress = [](void* context, const char*, int64_t, int64_t) {
        auto& mine = *static_cast<Calls*>(context);
        if (!mine.engine) return;
        int64_t last = 0;
        mine.elsewhere |= std::this_thread::get_id() != mine.program;
        mine.answers.push_back(ferry_engine_last_step(mine.engine, &last));
        mine.answers.push_back(ferry_engine_destroy(mine.engine));
    };
    ASSERT_DONE(ferry_engine_create(&options, &engine_));
    step();
    calls.engine = engine_;
    ASSERT_DONE(ferry_engine_save(engine_, (directory_ / "saved").c_str()));
    ASSERT_DONE(ferry_engine_export(engine_, (directory_ / "model").c_str(), FERRY_F32));
    EXPECT_TRUE(calls.elsewhere);
    EXPECT_GE(calls.answers.size(), 4u);
    for (const ferry_status answer : calls.answers) EXPECT_EQ(answer, FERRY_BUSY);
    EXPECT_EQ(step().step, 2);
}

TEST_F(CapiEngine, RanksNeedAnIdentityAndGpus) {
    const std::string text = config();
    auto options = sized<ferry_engine_options>();
    options.config_json = text.c_str();
    options.ranks = 2;
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "NCCL unique id");
    const std::vector<char> id(128, 1);
    options.nccl_unique_id = id.data();
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "device is \"cpu\"");
    options.rank = 2;
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "rank is out of range");
    options.rank = 0, options.ranks = 0;
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "ranks is out of range");
    options.gpu = -1;
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "gpu is out of range");
}

// A program that was compiled against version 3 says so by its structure's size.
TEST_F(CapiEngine, TakesOptionsOfOlderPrograms) {
    const std::string text = config();
    auto options = sized<ferry_engine_options>();
    options.config_json = text.c_str();
    options.size = offsetof(ferry_engine_options, fed);
    options.fed = 77;  // whatever lies behind it
    ASSERT_DONE(ferry_engine_create(&options, &engine_));
    EXPECT_EQ(step().step, 1);
    EXPECT_EQ(ferry_engine_destroy(std::exchange(engine_, nullptr)), FERRY_OK);
    options.size -= 1;
    EXPECT_REFUSED(ferry_engine_create(&options, &engine_), FERRY_USAGE, "size is wrong");
}

}  // namespace
}  // namespace ferry::train
