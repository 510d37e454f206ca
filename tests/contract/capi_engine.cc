// The engine through the C ABI: the numbers of the engine below it, and what is refused.
#include <string>
#include <utility>
#include <vector>

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

}  // namespace
}  // namespace ferry::train
