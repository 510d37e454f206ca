// Every given value reaches its field; every other field has the documented default.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/of_rank.h"
#include "ferry/config.h"
#include "ferry/error.h"
#include "markdown.h"
#include "schema.h"

namespace ferry {
namespace {

constexpr const char* kSmall = R"({"steps": 10,
    "model": {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 96},
    "data": {"tokens": "t.bin"}, "batch": {"sequence": 32}})";

Config parse(const std::vector<std::string>& overrides, const char* json = kSmall) {
    return parse_config(json, "run.json", overrides);
}

TEST(Config, Defaults) {
    const Config c = parse({});
    EXPECT_EQ(c.model.kv_heads, 4);
    EXPECT_EQ(c.model.head_dim, 16);
    EXPECT_EQ(c.model.vocab, 256);
    EXPECT_EQ(c.schedule.total_steps, 10);
    EXPECT_EQ(c.optimizer.method, optim::Method::adamw);
    EXPECT_EQ(c.optimizer.beta2, 0.999);
    EXPECT_EQ(c.optimizer.eps, 1e-8);
    EXPECT_EQ(c.schedule.decay_steps, 1);
    EXPECT_EQ(c.budgets.host_bytes, kUnlimited);
    EXPECT_TRUE(c.budgets.nvme.empty());
    EXPECT_EQ(c.precision, DType::f32);
}

TEST(Config, EveryKindOfValue) {
    const Config c = parse({}, R"({
        // comments are allowed
        "steps": 1e3, "seed": 4294967295, "freeze": ["embed*", "lm_head"], "clip_norm": 1,
        "precision": "bf16", "threads": "auto", "reserved_cores": [0, 3],
        "model": {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 24,
                  "intermediate": 96, "tie_embeddings": true, "rope_theta": 5e5},
        "data": {"tokens": "t.bin", "held_back": 0},
        "batch": {"sequence": 32, "micro_batches": 4},
        "optimizer": {"betas": [0.8, 0.95]},
        "budgets": {"device": "24MiB", "host": 1048576,
                    "nvme": [{"path": "/a", "size": "1.5 GiB", "endurance_tbw": 600}, "/b"]},
        "swap": {"chunk_elements": 8192, "groups": 2, "state_on_nvme": "auto"},
        "io": {"block_bytes": "256KiB", "queue_depth": 8, "rings": 3,
               "direct": false, "leftovers": "reuse"}})");
    EXPECT_EQ(c.steps, 1000);
    EXPECT_EQ(c.reserved_cores, (std::vector<int>{0, 3}));
    EXPECT_EQ(c.seed, 4294967295u);
    EXPECT_EQ(c.freeze, (std::vector<std::string>{"embed*", "lm_head"}));
    EXPECT_EQ(c.threads, std::nullopt);
    EXPECT_EQ(c.model.head_dim, 24);
    EXPECT_TRUE(c.model.tie_embeddings);
    EXPECT_EQ(c.optimizer.beta1, 0.8);
    EXPECT_EQ(c.optimizer.beta2, 0.95);
    EXPECT_EQ(c.budgets.device_bytes, 24 * kMiB);
    EXPECT_EQ(c.budgets.host_bytes, kMiB);
    ASSERT_EQ(c.budgets.nvme.size(), 2u);
    EXPECT_EQ(c.budgets.nvme[0].size_bytes, 3 * kGiB / 2);
    EXPECT_EQ(c.budgets.nvme[0].endurance_tbw, 600);
    EXPECT_EQ(c.budgets.nvme[1].path, "/b");
    EXPECT_EQ(c.budgets.nvme[1].size_bytes, kUnlimited);
    EXPECT_EQ(c.swap.state_on_nvme, std::nullopt);
    EXPECT_EQ(c.io.block_bytes, 256 * kKiB);
    EXPECT_EQ(c.io.rings, 3);
    EXPECT_FALSE(c.io.direct);
    EXPECT_EQ(c.io.leftovers, aio::Leftover::reuse);
}

// The text that ranks compare and that a run's record holds does not change with how a value is
// kept.
TEST(Config, WordsAndWhatNobodyGaveAreDescribedAsTheyAreWritten) {
    const auto described = [](const std::vector<std::string>& overrides, const char* key) {
        for (const KeyValue& one : describe_values(parse(overrides))) {
            if (one.key == key) return one.value;
        }
        return std::string("not there");
    };
    for (const char* key : {"swap.expect_clipped", "swap.state_on_nvme", "swap.state_on_device",
                            "swap.save_attention", "swap.save_mlp", "swap.save_inputs"}) {
        EXPECT_EQ(described({}, key), "auto") << key;
        EXPECT_EQ(described({std::string(key) + "=0"}, key), "0") << key;
        EXPECT_EQ(described({std::string(key) + "=auto"}, key), "auto") << key;
    }
    for (const char* key : {"threads", "swap.chunk_elements", "swap.chunks_at_once", "swap.groups",
                            "numerics.head_tile", "numerics.mlp_tile"}) {
        EXPECT_EQ(described({}, key), "auto") << key;
        EXPECT_EQ(described({std::string(key) + "=auto"}, key), "auto") << key;
    }
    EXPECT_EQ(described({}, "numerics.residual"), "auto");
    EXPECT_EQ(described({"precision=bf16", "numerics.residual=bf16"}, "numerics.residual"), "bf16");
    EXPECT_EQ(described({}, "optimizer.moments"), "fp32");
    EXPECT_EQ(described({"device=cuda"}, "device"), "cuda");
    EXPECT_EQ(described({"io.leftovers=remove_any"}, "io.leftovers"), "remove_any");
}

// A configuration that is put together key by key.
TEST(Config, SetValueChecksAsAFileDoes) {
    Config config;
    set_value(config, "optimizer.method=lion");
    EXPECT_EQ(config.optimizer.method, optim::Method::lion);
    set_value(config, "swap.save_mlp=3");
    EXPECT_EQ(config.swap.save_mlp, 3);
    set_value(config, "swap.save_mlp=auto");
    EXPECT_EQ(config.swap.save_mlp, std::nullopt);
    try {
        set_value(config, "optimizer.method=lions");
        ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
        EXPECT_EQ(error.problem().limit,
                  "one of adamw, adam, sgd, lion, adagrad, muon, onebit_adam, zeroone_adam");
        EXPECT_EQ(error.problem().remedy, "did you mean \"lion\"?");
    }
}

TEST(Config, OverridesReplace) {
    const Config c =
        parse({"steps=6", "data.tokens=12", "budgets.host=2MiB", "budgets.nvme=[\"/y\"]",
               "batch.sequence=16", "model={\"layers\": 3}", "swap.state_on_nvme=auto"});
    EXPECT_EQ(c.steps, 6);
    EXPECT_EQ(c.schedule.total_steps, 6);
    EXPECT_EQ(c.data.tokens, "12");  // a path is text even when it looks like a number
    EXPECT_EQ(c.budgets.host_bytes, 2 * kMiB);
    ASSERT_EQ(c.budgets.nvme.size(), 1u);
    EXPECT_EQ(c.budgets.nvme[0].path, "/y");
    EXPECT_EQ(c.batch.sequence, 16);
    EXPECT_EQ(c.model.layers, 3);
    EXPECT_EQ(c.model.hidden, 64);  // a section merges
}

TEST(Config, AShortRunMayEndInsideTheWarmUp) {
    EXPECT_EQ(parse({"schedule.warmup_steps=20"}).schedule.total_steps, 20);
}

TEST(Config, OverridesCanGiveWhatIsRequired) {
    const Config c = parse({"data.tokens=a=b.bin"}, R"({"steps": 1, "batch": {"sequence": 8},
        "model": {"hidden": 8, "layers": 1, "heads": 2, "intermediate": 8}})");
    EXPECT_EQ(c.data.tokens, "a=b.bin");
}

// "auto" means the same as leaving a key out, and no number means it. The one exception decides
// bits of a run: it is chosen where it is asked for alone.
TEST(Config, AutoIsTheDefault) {
    const auto value_of = [](const std::vector<std::string>& overrides, std::string_view key) {
        for (const KeyValue& one : describe_values(parse(overrides)))
            if (one.key == key) return one.value;
        return std::string("not there");
    };
    for (const config::Key& key : config::schema()) {
        if (!key.automatic) continue;
        const std::string assign = std::string(key.path) + "=";
        const std::string needed = "checkpoint.dir=saved";  // for its other keys
        const bool chosen_if_asked = key.path == "parallel.virtual_stages";
        EXPECT_EQ(value_of({needed, assign + "auto"}, key.path),
                  chosen_if_asked ? "auto" : value_of({needed}, key.path))
            << key.path;
        EXPECT_THROW(parse({assign + "-1"}), Error) << key.path;
        if (key.range.low > 0) {
            EXPECT_THROW(parse({assign + "0"}), Error) << key.path;
        }
    }
}

TEST(Config, EveryKeyBelongsToASection) {
    for (const config::Key& key : config::schema()) {
        const size_t dot = key.path.find('.');
        const std::string_view name =
            dot == std::string_view::npos ? std::string_view() : key.path.substr(0, dot);
        const auto sections = config::sections();
        EXPECT_TRUE(std::any_of(sections.begin(), sections.end(), [name](const config::Section& s) {
            return s.name == name;
        })) << key.path;
        EXPECT_EQ(config::find_key(key.path), &key) << key.path << " is listed twice";
    }
}

TEST(Config, DocumentationIsCurrent) {
    const std::filesystem::path path =
        std::filesystem::path(FERRY_SOURCE_DIR) / "docs" / "configuration.md";
    std::ifstream file(path);
    const std::string page{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (page == describe_config_markdown()) return;
    const auto fresh = std::filesystem::path(testing::TempDir()) / "configuration.md";
    std::ofstream(fresh) << describe_config_markdown();
    ADD_FAILURE() << path << " is out of date; copy " << fresh << " over it";
}

// Recipes copied from the page are configurations; its first table has as many keys as it says.
TEST(Config, RecipesOfTheDocumentationAreConfigurations) {
    const std::string page = describe_config_markdown();
    const std::string fence = "```";
    int recipes = 0;
    for (size_t at = 0; (at = page.find(fence + "json\n", at)) != std::string::npos; ++recipes) {
        at += fence.size() + 5;
        const size_t end = page.find(fence, at);
        const Config config = parse({}, page.substr(at, end - at).c_str());
        EXPECT_EQ(config.data.tokens, "tokens.bin");
        at = end + fence.size();
    }
    EXPECT_EQ(recipes, 3);
    int usual = 0;
    const size_t end = page.find("## Three recipes");
    for (size_t at = 0; (at = page.find("\n| `", at)) < end; ++at) ++usual;
    EXPECT_EQ(usual, 12);
}

// The keys that a resumed run must have in common with the first one.
TEST(Config, TheTrainingIsDescribedByWhatDecidesItsNumbers) {
    const auto described = [](const std::vector<std::string>& overrides) {
        return describe_training(parse(overrides));
    };
    const std::string plain = described({});
    for (const char* same :
         {"budgets.host=1GiB", "swap.speculate=off", "io.backend=posix", "threads=3", "steps=77",
          "checkpoint.durable_steps=false", "data.tokens=b.bin"})
        EXPECT_EQ(described({same}), plain) << same;
    for (const char* other :
         {"optimizer.lr=0.00100000001", "optimizer.betas=[0.9, 0.9990000001]", "seed=9",
          "clip_norm=2.5", "freeze=[\"a\", \"b\"]", "on_nonfinite=skip", "schedule.kind=linear",
          "schedule.warmup_steps=7", "data.held_back=0.2", "precision=fp16",
          "optimizer.nesterov=true", "optimizer.moments=bf16"})
        EXPECT_NE(described({other}), plain) << other;
    // A rate that falls depends on where the run ends; a constant one does not.
    EXPECT_NE(described({"schedule.kind=linear", "steps=77"}), described({"schedule.kind=linear"}));
    EXPECT_NE(plain.find("\nclip_norm = "), std::string::npos);
}

TEST(Config, EveryOptimizerHasItsKeysAndDefaults) {
    const Config sgd = parse({"optimizer={\"method\": \"sgd\", \"momentum\": 0.9}",
                              "optimizer.nesterov=true", "optimizer.weight_decay=0.1"});
    EXPECT_EQ(sgd.optimizer.method, optim::Method::sgd);
    EXPECT_EQ(sgd.optimizer.momentum, 0.9);
    EXPECT_TRUE(sgd.optimizer.nesterov);
    EXPECT_EQ(sgd.optimizer.weight_decay, 0.1);
    EXPECT_EQ(parse({"optimizer.method=lion"}).optimizer.beta1, 0.9);
    EXPECT_EQ(parse({"optimizer.method=lion"}).optimizer.beta2, 0.99);
    const Config muon = parse({"optimizer.method=muon"});
    EXPECT_EQ(muon.optimizer.momentum, 0.95);
    EXPECT_TRUE(muon.optimizer.nesterov);
    EXPECT_FALSE(parse({"optimizer.method=muon", "optimizer.momentum=0"}).optimizer.nesterov);
    EXPECT_EQ(parse({"optimizer.method=muon", "optimizer.ns_coefficients=[2, -1.5, 0.5]"})
                  .optimizer.ns_coefficients.c,
              0.5);
    const Config lion = parse({"optimizer.method=lion", "optimizer.betas=[0.95, 0.98]"});
    EXPECT_EQ(lion.optimizer.beta1, 0.95);
    EXPECT_EQ(lion.optimizer.beta2, 0.98);
    EXPECT_EQ(parse({"optimizer.method=adagrad"}).optimizer.eps, 1e-10);
    const Config adagrad =
        parse({"optimizer.method=adagrad", "optimizer.eps=0", "optimizer.initial_accumulator=0.1"});
    EXPECT_EQ(adagrad.optimizer.eps, 0);
    EXPECT_EQ(adagrad.optimizer.initial_accumulator, 0.1);
    EXPECT_EQ(parse({"optimizer.method=adam"}).optimizer.eps, 1e-8);
}

TEST(Config, EveryScheduleHasItsKeysAndDefaults) {
    using enum optim::Decay;
    const std::vector<std::pair<std::string, optim::Decay>> kinds{
        {"constant", constant}, {"linear", linear},       {"cosine", cosine},
        {"wsd", wsd},           {"one_cycle", one_cycle}, {"warmup_decay", warmup_decay}};
    for (const auto& [word, kind] : kinds)
        EXPECT_EQ(parse({"schedule.kind=" + word}).schedule.kind, kind) << word;
    const Config c = parse({"steps=200", "schedule.kind=wsd", "schedule.warmup_steps=20"});
    EXPECT_EQ(c.schedule.total_steps, 200);
    EXPECT_EQ(c.schedule.decay_steps, 20);
    EXPECT_EQ(parse({"schedule.decay_steps=7"}).schedule.decay_steps, 7);
    EXPECT_EQ(
        parse({"steps=5", "schedule.kind=wsd", "schedule.warmup_steps=20"}).schedule.decay_steps,
        1);  // a trial run that ends inside the warm-up
    EXPECT_TRUE(parse({"schedule.log_warmup=true"}).schedule.log_warmup);
}

TEST(Config, WarnsOfWhatTheMethodDoesNotUse) {
    const auto warned = [](const std::vector<std::string>& overrides) {
        testing::internal::CaptureStderr();
        parse(overrides);
        return testing::internal::GetCapturedStderr();
    };
    EXPECT_EQ(warned({"optimizer.method=sgd", "optimizer.momentum=0.9"}), "");
    EXPECT_EQ(warned({"optimizer.betas=[0.9, 0.95]", "optimizer.eps=1e-6"}), "");
    const std::string unused = warned({"optimizer.method=sgd", "optimizer.betas=[0.9, 0.95]"});
    EXPECT_NE(unused.find("optimizer.betas does nothing with sgd"), std::string::npos) << unused;
    EXPECT_NE(unused.find("adamw, adam, lion"), std::string::npos) << unused;
    const std::string none = warned({"optimizer.method=sgd", "optimizer.moments=bf16"});
    EXPECT_NE(none.find("optimizer.moments does nothing with sgd"), std::string::npos) << none;
    EXPECT_EQ(warned({"optimizer.moments=bf16", "optimizer.master=split", "precision=bf16"}), "");
    EXPECT_NE(warned({"schedule.decay_steps=3"}).find("schedule.decay_steps"), std::string::npos);
    EXPECT_EQ(warned({"swap.expect_clipped=0.1", "clip_norm=1"}), "");
    const auto in_vain = [&](const std::vector<std::string>& overrides, const char* why) {
        const std::string said = warned(overrides);
        EXPECT_NE(said.find(why), std::string::npos) << said;
    };
    in_vain({"swap.expect_clipped=0.1"}, "swap.expect_clipped does nothing with clip_norm 0");
    in_vain({"swap.expect_clipped=0.1", "clip_norm=1", "swap.speculate=off"},
            "with swap.speculate off; it is for swap.speculate auto, swap.speculate all");
}

TEST(Config, WarnsOfASecondMomentThatStaysBeforeTheWarmUpIsOver) {
    const auto warned = [](const std::string& method, const std::string& key, int freeze) {
        testing::internal::CaptureStderr();
        parse({"optimizer.method=" + method, key + "=" + std::to_string(freeze), "steps=100",
               "schedule.warmup_steps=20"});
        return testing::internal::GetCapturedStderr();
    };
    for (const auto& [method, key] : {std::pair{"onebit_adam", "optimizer.freeze_step"},
                                      std::pair{"zeroone_adam", "optimizer.var_freeze_step"}}) {
        SCOPED_TRACE(method);
        EXPECT_EQ(warned(method, key, 20), "");
        const std::string said = warned(method, key, 19);
        EXPECT_NE(said.find(std::string(key) + " is 19, and schedule.warmup_steps 20"),
                  std::string::npos)
            << said;
        EXPECT_NE(said.find("set it to no less"), std::string::npos) << said;
        // All ranks read the same: another than the first says nothing.
        const OfRank second(1);
        EXPECT_EQ(warned(method, key, 19), "");
    }
}

TEST(Config, WarnsOfLocalStepsThatTheRunDoesNotReach) {
    const auto warned = [](const std::string& scaler) {
        testing::internal::CaptureStderr();
        std::vector<std::string> keys{"optimizer.method=zeroone_adam",
                                      "optimizer.var_freeze_step=20",
                                      "optimizer.local_step_clipper=16",
                                      "zero.stage=0",
                                      "steps=100",
                                      "schedule.warmup_steps=20"};
        if (!scaler.empty()) keys.push_back("optimizer.local_step_scaler=" + scaler);
        parse(keys);
        return testing::internal::GetCapturedStderr();
    };
    EXPECT_EQ(warned("79"), "");
    for (const char* scaler : {"80", ""}) {
        const std::string said = warned(scaler);
        for (const char* part : {"optimizer.local_step_clipper is 16", "no step is local",
                                 "var_freeze_step 20", "set local_step_scaler below"})
            EXPECT_NE(said.find(part), std::string::npos) << said;
    }
}

TEST(Config, WarnsOnTheFirstRanksThreadAlone) {
    const auto warned = [] {
        testing::internal::CaptureStderr();
        parse({"parallel.virtual_stages=2"});
        return testing::internal::GetCapturedStderr();
    };
    EXPECT_NE(warned(), "");
    {
        const OfRank second(1);
        EXPECT_EQ(warned(), "");
        {
            const OfRank first(0);
            EXPECT_NE(warned(), "");
        }
        EXPECT_EQ(warned(), "");
    }
    EXPECT_NE(warned(), "");
}

TEST(Config, ExamplesAreValid) {
    const std::filesystem::path examples = std::filesystem::path(FERRY_SOURCE_DIR) / "examples";
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(examples)) {
        if (entry.path().extension() != ".json") continue;
        EXPECT_NO_THROW(load_config(entry.path().string(), {})) << entry.path();
        ++count;
    }
    EXPECT_GE(count, 1);
}

}  // namespace
}  // namespace ferry
