// Everything a user can get wrong, one row each: the error names the key and what to do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "ferry/config.h"
#include "ferry/error.h"

namespace ferry {
namespace {

using testing::HasSubstr;

constexpr const char* kSmall = R"({"steps": 10,
    "model": {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 96},
    "data": {"tokens": "t.bin"}, "batch": {"sequence": 32}})";

struct Case {
    const char* name;
    std::vector<std::string> overrides;
    std::vector<const char*> parts;  // of the message
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::string refusal(const std::string& json, const std::vector<std::string>& overrides) {
    try {
        parse_config(json, "run.json", overrides);
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        return error.what();
    }
    ADD_FAILURE() << "accepted";
    return {};
}

class Refused : public testing::TestWithParam<Case> {};

TEST_P(Refused, NamesTheKey) {
    const std::string message = refusal(kSmall, GetParam().overrides);
    for (const char* part : GetParam().parts) EXPECT_THAT(message, HasSubstr(part));
    EXPECT_LE(message.size(), size_t{2000});
}

std::string many_paths(int count) {
    std::string list;
    for (int i = 0; i < count; ++i) list += (i == 0 ? "\"p" : ", \"p") + std::to_string(i) + '"';
    return "budgets.nvme=[" + list + "]";
}

const Case kCases[] = {
    {"UnknownKey", {"model.hiden=64"}, {"unknown key \"model.hiden\"", "\"model.hidden\""}},
    {"UnknownTopLevel", {"step=1"}, {"unknown key \"step\"", "\"steps\""}},
    {"UnknownSection", {"budget.host=1"}, {"unknown key", "\"budgets.host\""}},
    {"SharedTensorsOfWholeMatrices",
     {"parallel.tensor=2", "optimizer.method=muon"},
     {"optimizer.method", "muon, parallel.tensor 2", "Muon updates whole matrices",
      "\"adamw\", or parallel.tensor to 1"}},
    {"SharedTensorsOfMomentum",
     {"parallel.tensor=2", "optimizer.method=onebit_adam", "optimizer.freeze_step=2", "steps=10"},
     {"optimizer.method", "onebit_adam, parallel.tensor 2", "momentum travels among all ranks",
      "zero.compress.gradients", "or parallel.tensor to 1"}},
    {"SharedTensorsWhoseStepsAreKept",
     {"parallel.tensor=2", "checkpoint.durable_steps=true", "budgets.nvme=[\"p\"]"},
     {"checkpoint.durable_steps", "slices of tensors"}},
    {"SharedTensorsInCodedCheckpoints",
     {"parallel.tensor=2", "checkpoint.dir=c", "optimizer.moments=int8"},
     {"optimizer.moments", "int8, parallel.tensor 2"}},
    {"APipelineOfWholeMatrices",
     {"parallel.pipeline=2", "optimizer.method=muon"},
     {"optimizer.method", "muon, parallel.pipeline 2", "not yet of stages of a pipeline"}},
    {"APipelineOfMomentum",
     {"parallel.pipeline=2", "optimizer.method=zeroone_adam", "optimizer.var_freeze_step=2",
      "steps=10"},
     {"optimizer.method", "zeroone_adam, parallel.pipeline 2", "among stages of a pipeline",
      "zero.compress.gradients", "or parallel.pipeline to 1"}},
    {"APipelineWhoseStepsAreKept",
     {"parallel.pipeline=2", "checkpoint.durable_steps=true", "budgets.nvme=[\"p\"]"},
     {"checkpoint.durable_steps", "steps of a pipeline"}},
    {"RightWordWrongPlace", {"lr=0.1"}, {"unknown key \"lr\"", "\"optimizer.lr\""}},
    {"BelowAKey", {"seed.x=1"}, {"unknown key \"seed.x\"", "did you mean \"seed\""}},
    {"WordOfAnother", {"hidden_size=1"}, {"unknown key \"hidden_size\"", "\"model.hidden\""}},
    {"RightWordWrongSection", {"swap.lr=0.1"}, {"did you mean \"optimizer.lr\"?"}},
    {"NoneIsNearInItsSection",
     {"swap.bets=1"},
     {"unknown key \"swap.bets\"", "the keys of \"swap\" are ", ", speculate, "}},
    {"NearAndInItsSection", {"swap.expected_clip=1"}, {"did you mean \"swap.expect_clipped\"?"}},
    {"NoneIsNear", {"xyzzyxyzzy=1"}, {"the nearest is \"", "docs/configuration.md"}},
    {"ALetterIsNearToNone", {"a=1"}, {"the nearest is \"", "docs/configuration.md"}},
    {"NothingLikeIt", {"zzzzzzzzzzzz=1"}, {"docs/configuration.md"}},
    {"UnknownInSection", {"model={\"hedas\": 4}"}, {"\"model.hedas\"", "\"model.heads\""}},
    {"SectionIsNoObject", {"model=7"}, {"wrong type", "model", "wanted an object"}},
    {"TextForNumber", {"steps=many"}, {"wrong type", "steps", "text \"many\"", "whole number"}},
    {"FractionForInteger", {"steps=1.5"}, {"wrong type", "number 1.5", "whole number"}},
    {"NumberForBoolean", {"io.direct=1"}, {"wrong type", "number 1", "true"}},
    {"BooleanForNumber", {"optimizer.lr=true"}, {"wrong type", "boolean true", "number"}},
    {"NullForNumber", {"optimizer.lr=null"}, {"wrong type", "null"}},
    {"ObjectForText", {"freeze=[{}]"}, {"wrong type", "freeze", "object {}"}},
    {"EmptyText",
     {"data.tokens="},
     {"without a character", "data.tokens", "text \"\"", "leave the key out"}},
    {"OneBeta", {"optimizer.betas=[0.9]"}, {"optimizer.betas", "list of two numbers"}},
    {"BetaOfOne", {"optimizer.betas=[0.9, 1.0]"}, {"outside its range", "below 1"}},
    {"BetaThatRoundsToOne",
     {"optimizer.betas=[0.9, 0.99999999]"},
     {"optimizer.betas", "rounds to 1 in fp32", "0.99999999", "at most 0.9999999"}},
    {"MomentumThatRoundsToOne",
     {"optimizer.method=sgd", "optimizer.momentum=0.99999999"},
     {"optimizer.momentum", "rounds to 1 in fp32"}},
    {"DurableStepsWithoutNvme",
     {"checkpoint.durable_steps=true"},
     {"checkpoint.durable_steps", "add a path to budgets.nvme"}},
    {"DurableStepsInPart",
     {"checkpoint.durable_steps=true", "budgets.nvme=[\"/x\"]", "swap.state_on_nvme=0.5"},
     {"checkpoint.durable_steps", "swap.state_on_nvme 0.5", "leave swap.state_on_nvme out"}},
    {"DurableStepsOnTheDevice",
     {"checkpoint.durable_steps=true", "budgets.nvme=[\"/x\"]", "swap.state_on_device=0.5"},
     {"checkpoint.durable_steps", "swap.state_on_device 0.5", "leave swap.state_on_device out"}},
    {"DurableStepsUnchecked",
     {"checkpoint.durable_steps=true", "budgets.nvme=[\"/x\"]", "swap.verify=false"},
     {"checkpoint.durable_steps", "set swap.verify to true"}},
    {"NoSteps", {"steps=0"}, {"outside its range", "steps", "at least 1"}},
    {"SeedTooLarge", {"seed=4294967296"}, {"seed", "4294967296", "at most 4294967295"}},
    {"TimeoutOfCenturies",
     {"zero.timeout_seconds=1e10"},
     {"outside its range", "zero.timeout_seconds", "at most 1000000000"}},
    {"BlockOfCodesThatDividesNoLeaf",
     {"zero.compress.gradients=int8", "zero.compress.block=96"},
     {"zero.compress.block", "block 96", "set block 64"}},
    {"BlockOfCodesTooLarge",
     {"zero.compress.gradients=int8", "zero.compress.block=4096"},
     {"zero.compress.block", "at most 2048"}},
    {"CodedWeightsThatNobodyGathers",
     {"zero.compress.weights=int8", "zero.stage=2"},
     {"zero.compress.weights", "zero.stage 2", "set zero.stage to 3"}},
    {"SecondShardsBelowStage3",
     {"zero.second_shard=host", "zero.ranks_per_host=2", "zero.stage=2"},
     {"zero.second_shard", "zero.stage 2", "set zero.stage to 3"}},
    {"SecondShardsOfNoHost",
     {"zero.second_shard=host"},
     {"zero.second_shard", "zero.ranks_per_host 1", "set zero.ranks_per_host"}},
    {"HostsOfSlices",
     {"zero.second_shard=host", "zero.ranks_per_host=2", "parallel.tensor=2"},
     {"zero.ranks_per_host", "parallel.tensor 2", "parallel.tensor to 1"}},
    {"HostsOfStages",
     {"zero.compress.gradients=int8", "zero.ranks_per_host=2", "parallel.pipeline=2"},
     {"zero.ranks_per_host", "parallel.pipeline 2", "parallel.pipeline to 1"}},
    {"CodedWeightsInHalfBytes", {"zero.compress.weights=int4"}, {"zero.compress.weights", "int4"}},
    {"HugeInteger", {"steps=18446744073709551615"}, {"outside its range", "steps"}},
    {"NegativeLr", {"optimizer.lr=-1"}, {"outside its range", "at least 0"}},
    {"NegativeEps", {"optimizer.eps=-1e-8"}, {"outside its range", "at least 0"}},
    {"ReservedCoreIsNoNumber", {"reserved_cores=[\"a\"]"}, {"reserved_cores", "list of whole"}},
    {"ReservedCoreIsNegative", {"reserved_cores=[-1]"}, {"reserved_cores", "at least 0"}},
    {"UnknownMethod",
     {"optimizer.method=adamv"},
     {"optimizer.method", "lion, adagrad", "\"adamw\"?"}},
    {"MomentumOfOne", {"optimizer.momentum=1"}, {"optimizer.momentum", "below 1"}},
    {"NesterovOfNothing",
     {"optimizer.method=sgd", "optimizer.nesterov=true"},
     {"optimizer.nesterov", "momentum 0", "set optimizer.momentum"}},
    {"MuonsKeyBesideAnother",
     {"optimizer.ns_steps=4"},
     {"optimizer.ns_steps", "Muon's alone", "optimizer.method adamw", "\"muon\""}},
    {"MuonsRateBesideAnother",
     {"optimizer.method=lion", "optimizer.adamw_lr=1e-3"},
     {"optimizer.adamw_lr", "Muon's alone", "lion"}},
    {"NoIterations",
     {"optimizer.method=muon", "optimizer.ns_steps=0"},
     {"optimizer.ns_steps", "outside its range", "at least 1"}},
    {"TwoCoefficients",
     {"optimizer.method=muon", "optimizer.ns_coefficients=[1.5, -0.5]"},
     {"optimizer.ns_coefficients", "list of three numbers"}},
    {"CoefficientsThatDiverge",
     {"optimizer.method=muon", "optimizer.ns_coefficients=[3.4445, 4.775, 2.0315]"},
     {"optimizer.ns_coefficients", "of 1 they make 10.251", "[1.5, -0.5, 0]"}},
    {"UnknownAdjustment",
     {"optimizer.method=muon", "optimizer.adjust_lr=rms"},
     {"optimizer.adjust_lr", "original, match_rms_adamw, spectral_unclamped"}},
    {"FreezeStepBesideAnother",
     {"optimizer.freeze_step=4"},
     {"optimizer.freeze_step", "1-bit Adam's alone", "optimizer.method adamw", "\"onebit_adam\""}},
    {"NoFreezeStep",
     {"optimizer.method=onebit_adam"},
     {"optimizer.freeze_step", "after how many updates", "15 to 25 %"}},
    {"FreezeStepOfNone",
     {"optimizer.method=onebit_adam", "optimizer.freeze_step=0", "steps=10"},
     {"optimizer.freeze_step", "after how many updates", "1 or more", "15 to 25 %"}},
    {"VarFreezeStepOfNone",
     {"optimizer.method=zeroone_adam", "optimizer.var_freeze_step=0", "steps=10"},
     {"optimizer.var_freeze_step", "after how many updates", "1 or more", "warmup_steps"}},
    {"FreezeStepOfNoneBesideAnother",
     {"optimizer.freeze_step=0"},
     {"optimizer.freeze_step", "1-bit Adam's alone", "optimizer.method adamw", "\"onebit_adam\""}},
    {"FreezeStepBelowZero",
     {"optimizer.method=onebit_adam", "optimizer.freeze_step=-1", "steps=10"},
     {"optimizer.freeze_step", "-1", "15 to 25 % of the steps"}},
    {"VarFreezeStepBelowZero",
     {"optimizer.method=zeroone_adam", "optimizer.var_freeze_step=-1", "steps=10"},
     {"optimizer.var_freeze_step", "-1", "schedule.warmup_steps or more"}},
    {"FreezeStepOfARunOfOneStep",
     {"optimizer.method=onebit_adam", "optimizer.freeze_step=1", "steps=1"},
     {"optimizer.freeze_step", "freeze_step 1, steps 1", "2 steps or more", "set steps to 2"}},
    {"FreezeStepBeyondTheRun",
     {"optimizer.method=onebit_adam", "optimizer.freeze_step=10", "steps=10"},
     {"optimizer.freeze_step", "the run ends before", "freeze_step 10, steps 10", "below steps"}},
    {"OnebitAdamWithNarrowMoments",
     {"optimizer.method=onebit_adam", "optimizer.freeze_step=2", "steps=10",
      "optimizer.moments=bf16"},
     {"optimizer.moments", "moments bf16", "set it to fp32"}},
    {"OnebitAdamWithCodedGradients",
     {"optimizer.method=onebit_adam", "optimizer.freeze_step=2", "steps=10",
      "zero.compress.gradients=int8"},
     {"zero.compress.gradients", "they are not coded", "gradients int8"}},
    {"OnebitAdamWithDurableSteps",
     {"optimizer.method=onebit_adam", "optimizer.freeze_step=2", "steps=10",
      "checkpoint.durable_steps=true"},
     {"checkpoint.durable_steps", "do not survive", "optimizer.method onebit_adam",
      "checkpoint.dir"}},
    {"OnebitAdamWithABlockThatDividesNoLeaf",
     {"optimizer.method=onebit_adam", "optimizer.freeze_step=2", "steps=10",
      "zero.compress.block=96"},
     {"zero.compress.block", "block 96", "set block 64"}},
    {"KeysOfZerooneAdamBesideAnother",
     {"optimizer.method=onebit_adam", "optimizer.freeze_step=2", "steps=10",
      "optimizer.var_update_scaler=4"},
     {"optimizer.var_update_scaler", "0/1 Adam's alone", "optimizer.method onebit_adam",
      "\"zeroone_adam\""}},
    {"NoVarFreezeStep",
     {"optimizer.method=zeroone_adam", "steps=10"},
     {"optimizer.var_freeze_step", "after how many updates", "var_freeze_step 0"}},
    {"VarianceThatChangesToTheEnd",
     {"optimizer.method=zeroone_adam", "optimizer.var_freeze_step=40", "steps=10"},
     {"optimizer.var_freeze_step", "the run ends before", "var_freeze_step 40", "scaler 16"}},
    {"ZerooneAdamWithNarrowMoments",
     {"optimizer.method=zeroone_adam", "optimizer.var_freeze_step=2", "steps=10",
      "optimizer.moments=int8"},
     {"optimizer.moments", "zeroone_adam exchanges", "moments int8"}},
    {"LocalStepsOfShardedState",
     {"optimizer.method=zeroone_adam", "optimizer.var_freeze_step=2", "steps=10",
      "optimizer.local_step_clipper=4", "zero.stage=1"},
     {"optimizer.local_step_clipper", "weights of its own", "zero.stage 1", "zero.stage to 0"}},
    {"LocalStepsOfSharedSequences",
     {"optimizer.method=zeroone_adam", "optimizer.var_freeze_step=2", "steps=10",
      "optimizer.local_step_clipper=4", "zero.stage=0", "parallel.sequence=2"},
     {"optimizer.local_step_clipper", "share sequences", "parallel.sequence 2"}},
    {"LocalStepsOfASplitMaster",
     {"optimizer.method=zeroone_adam", "optimizer.var_freeze_step=2", "steps=10",
      "optimizer.local_step_clipper=4", "zero.stage=0", "precision=bf16", "optimizer.master=split"},
     {"optimizer.local_step_clipper", "split master", "optimizer.master to fp32"}},
    {"NothingToLookAheadWith",
     {"optimizer.method=muon", "optimizer.momentum=0", "optimizer.nesterov=true"},
     {"optimizer.nesterov", "momentum 0"}},
    {"NegativeAccumulator", {"optimizer.initial_accumulator=-1"}, {"at least 0"}},
    {"UnknownSchedule", {"schedule.kind=cosin"}, {"schedule.kind", "wsd", "\"cosine\"?"}},
    {"UnknownPrecision", {"precision=fp23"}, {"precision", "fp32, bf16", "\"fp32\"?"}},
    {"UnknownUnit", {"budgets.host=3 parsecs"}, {"not a size", "budgets.host", "3 parsecs"}},
    {"BooleanForSize", {"budgets.host=true"}, {"wrong type", "budgets.host", "size"}},
    {"NegativeSize", {"budgets.host=-5"}, {"outside its range", "budgets.host"}},
    {"VolumeWithoutPath", {"budgets.nvme=[{\"size\": 1}]"}, {"budgets.nvme[0].path", "missing"}},
    {"VolumeUnknownKey",
     {"budgets.nvme=[{\"path\": \"a\", \"sice\": 1}]"},
     {"unknown key", "budgets.nvme[0].sice", "\"size\"?"}},
    {"VolumeSize",
     {"budgets.nvme=[\"a\", {\"path\": \"b\", \"size\": 0}]"},
     {"budgets.nvme[1].size", "at least 1 B"}},
    {"EpsilonThatFp32HasNoRoomFor", {"model.norm_eps=1e300"}, {"model.norm_eps", "at most 1"}},
    {"EpsilonThatIsZeroInFp32", {"model.norm_eps=1e-300"}, {"model.norm_eps", "at least 1e-30"}},
    {"ThetaThatTurnsNothing", {"model.rope_theta=1e300"}, {"model.rope_theta", "at most 1e+15"}},
    {"MorePathsThanAVolumeTakes", {many_paths(1025)}, {"budgets.nvme", "1025 paths", "1024"}},
    {"VolumeTwice", {"budgets.nvme=[\"a\", \"a\"]"}, {"same path twice", "budgets.nvme[1]"}},
    {"HeadsNotDividing", {"model.heads=5"}, {"model.heads", "hidden 64, heads 5", "set heads 4"}},
    {"KvHeads", {"model.kv_heads=3"}, {"model.kv_heads", "heads 4, kv_heads 3", "set kv_heads 2"}},
    {"OddHeadDim", {"model.head_dim=7"}, {"model.head_dim", "even", "head_dim 7"}},
    {"ChunkElements", {"swap.chunk_elements=5000"}, {"4,096", "set chunk_elements 8192"}},
    {"BlockBytes", {"io.block_bytes=5000"}, {"4 KiB", "set block_bytes 8192"}},
    {"GroupsOfNothing",
     {"swap.groups=2"},
     {"--set swap.groups=2: swap.groups", "groups 2, micro_batches 1"}},
    {"WarmUpTooLong",
     {"schedule.total_steps=10", "schedule.warmup_steps=11"},
     {"warmup_steps 11, total_steps 10"}},
    {"EvaluateNothing", {"evaluate.every=5"}, {"evaluate.micro_batches"}},
    {"EvaluateWithoutText",
     {"evaluate.micro_batches=2", "data.held_back=0"},
     {"evaluate.micro_batches", "held_back"}},
    {"NoPathForState", {"swap.state_on_nvme=0.5"}, {"swap.state_on_nvme", "budgets.nvme is empty"}},
    {"SplitOfNoBf16", {"optimizer.master=split"}, {"optimizer.master", "precision fp32", "bf16"}},
    {"MomentsOfNone",
     {"optimizer.method=sgd", "optimizer.moments=int8"},
     {"optimizer.moments", "sgd without momentum keeps no moments"}},
    {"UnknownMoments", {"optimizer.moments=fp16"}, {"optimizer.moments", "fp32, bf16, int8"}},
    {"ResidualWiderThanCompute", {"numerics.residual=bf16"}, {"numerics.residual", "precision"}},
    {"OverrideGivesAKeyTwice",
     {"model={\"layers\": 1, \"layers\": 2}"},
     {"\"layers\" is given twice", "--set model"}},
    {"OverrideNestedDeep", {"budgets.nvme=" + std::string(5000, '[')}, {"nested too deep"}},
    {"OverrideOfNoText",
     {"data.tokens=\"/tmp/a\\u0000b\""},
     {"NUL character", "--set data.tokens"}},
    {"ByteThatIsNoText", {"steps=\xff"}, {"wrong type", "--set steps=\\xff", "whole number"}},
    {"WordThatIsNoText", {"precision=\xff"}, {"unknown value", "fp32, bf16"}},
    {"KeyThatIsNoText", {"\xff=1"}, {"unknown key \"\\xff\""}},
    {"NumberThatNothingHolds", {"optimizer.lr=1e999"}, {"optimizer.lr", "1e999"}},
    {"LongText",
     {"steps=" + std::string(1 << 20, 'x')},
     {"steps", "bytes): steps", "(1048578 bytes)"}},
    {"LongKey", {std::string(1 << 20, 'x') + "=1"}, {"unknown key", "bytes)"}},
    {"UnknownSmallVocabulary",
     {"data.small_vocabulary=allow"},
     {"data.small_vocabulary", "refuse, ignore"}},
    {"NoEquals", {"steps"}, {"not an override", "--set steps", "--set key=value"}},
};

INSTANTIATE_TEST_SUITE_P(Values, Refused, testing::ValuesIn(kCases),
                         [](const auto& row) { return row.param.name; });

TEST(Config, RequiredKeys) {
    EXPECT_THAT(refusal("{}", {}), HasSubstr("run.json: steps"));
    EXPECT_THAT(refusal(R"({"steps": 1})", {}), HasSubstr("run.json: model.hidden"));
}

TEST(Config, MalformedJsonHasLineAndColumn) {
    EXPECT_THAT(refusal("{\n  \"steps\": 3,\n  \"seed\" 4\n}", {}),
                HasSubstr("run.json: line 3, column 10"));
    EXPECT_THAT(refusal("", {}), HasSubstr("line 1, column 1"));
    EXPECT_THAT(refusal("{\"steps\": 1e999}", {}), HasSubstr("not valid JSON"));
    EXPECT_THAT(refusal("[]", {}), HasSubstr("wanted an object"));
}

TEST(Config, NestedDeepAndBytesThatAreNoTextHaveTheirPlace) {
    const std::string deep = R"({"steps": 1,
        "unknown": )" + std::string(1'000'000, '[');
    EXPECT_THAT(refusal(deep, {}), HasSubstr("nested too deep"));
    EXPECT_THAT(refusal(deep, {}), HasSubstr("run.json: line 2, column"));
    EXPECT_THAT(refusal("{\"steps\": 1,\n\"device\": \"\xff\"}", {}),
                HasSubstr("run.json: line 2, column 12"));
    const std::string nul = std::string("{\"steps\": 1}") + '\0' + ", \"seed\": 3}";
    EXPECT_THAT(refusal(nul, {}), HasSubstr("a NUL byte"));
    EXPECT_THAT(refusal(R"({"data": {"tokens": "a\u0000b"}})", {}), HasSubstr("NUL character"));
}

TEST(Config, DuplicateKey) {
    const std::string message = refusal(R"({"steps": 1, "steps": 2})", {});
    EXPECT_THAT(message, HasSubstr("\"steps\" is given twice"));
    // As a section's and by its whole name: two names of JSON's, one key of ours.
    EXPECT_THAT(refusal(R"({"model": {"hidden": 8}, "model.hidden": 16})", {}),
                HasSubstr("\"model.hidden\" is given twice"));
    // The same name in two sections is two keys.
    EXPECT_THAT(refusal(R"({"data": {"x": 1}, "model": {"x": 1}})", {}), HasSubstr("unknown key"));
}

TEST(Config, FileMissingOrNoFile) {
    const auto refused = [](const std::string& path) -> std::string {
        try {
            load_config(path, {});
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            return error.what();
        }
        return "accepted";
    };
    EXPECT_THAT(refused("/nonexistent/run.json"), HasSubstr("No such file"));
    EXPECT_THAT(refused(testing::TempDir()), HasSubstr("directory"));
    const auto empty = std::filesystem::path(testing::TempDir()) / "ferry_empty.json";
    std::ofstream(empty).close();
    EXPECT_THAT(refused(empty.string()), HasSubstr("empty"));
    std::filesystem::remove(empty);
    EXPECT_THAT(refused("/dev/zero"), HasSubstr("no regular file"));
}

}  // namespace
}  // namespace ferry
