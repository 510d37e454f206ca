#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "model/huggingface.h"

namespace ferry::model {
namespace {

using nlohmann::json;

json llama() {
    return {{"model_type", "llama"},          {"hidden_size", 64},        {"num_hidden_layers", 3},
            {"num_attention_heads", 4},       {"intermediate_size", 160}, {"vocab_size", 500},
            {"max_position_embeddings", 256}, {"rms_norm_eps", 1e-6}};
}

json changed(json config, const json& by) {
    config.update(by);
    return config;
}

Shape read(const json& config) { return read_description(config.dump(), "here").shape; }

void expect_text_refused(const std::string& config, std::initializer_list<const char*> said) {
    try {
        read_description(config, "here");
        FAIL() << config;
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        for (const char* text : said)
            EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
}

void expect_refused(const json& config, std::initializer_list<const char*> said) {
    expect_text_refused(config.dump(), said);
}

TEST(HuggingFace, a_key_is_given_once) {
    expect_text_refused(R"({"model_type":"llama","hidden_size":64,"hidden_size":32})",
                        {"hidden_size", "twice"});
}

TEST(HuggingFace, nesting_is_bounded_wherever_it_is) {
    const std::string deep(1'000'000, '[');
    for (const char* key : {"model_type", "type", "rope_scaling", "layers", "num_hidden_layers",
                            "torch_dtype", "unknown"})
        expect_text_refused(std::string(R"({"model_type":"llama",")") + key + "x\":" + deep,
                            {"nested too deep", "here: line 1, column"});
    // Within the bound, and nothing that ferry knows: as everything else that it does not read.
    json settings;
    for (int i = 0; i < 40; ++i) settings = json{{"more", settings}};
    EXPECT_EQ(read(changed(llama(), {{"unknown", settings}})).hidden, 64);
    expect_refused(changed(llama(), {{"num_hidden_layers", settings}}), {"num_hidden_layers"});
    expect_refused(changed(llama(), {{"rope_scaling", {{"type", settings}}}}), {"rope_scaling"});
    expect_refused(changed(llama(), {{"num_hidden_layers", std::string(1 << 20, 'x')}}),
                   {"num_hidden_layers", "bytes)"});
}

TEST(HuggingFace, the_type_of_the_weights_is_a_name) {
    for (const char* key : {"dtype", "torch_dtype"}) {
        expect_refused(changed(llama(), {{key, {{"text", "bfloat16"}}}}), {key, "no name"});
        expect_refused(changed(llama(), {{key, json::array({"bfloat16"})}}), {key, "no name"});
        EXPECT_EQ(read(changed(llama(), {{key, "bfloat16"}})).hidden, 64);
        EXPECT_EQ(read(changed(llama(), {{key, nullptr}})).hidden, 64);
    }
}

TEST(HuggingFace, text_that_is_none_has_its_place) {
    expect_text_refused("{\"model_type\":\n\"\xff\"}", {"here: line 2, column 2", "\\xff"});
    expect_text_refused(R"({"model_type":1e999})", {"here: line 1, column", "1e999"});
}

TEST(HuggingFace, what_is_not_said_is_what_transformers_takes) {
    const Description found = read_description(llama().dump(), "here");
    const Shape& s = found.shape;
    EXPECT_EQ(s.kv_heads, 4);
    EXPECT_EQ(s.head_dim, 16);
    EXPECT_EQ(s.rope_theta, 10000);
    EXPECT_EQ(found.context, 256);
    EXPECT_FALSE(s.tie_embeddings || s.qkv_bias || s.mlp_bias || s.smaller_residuals);
    EXPECT_FALSE(found.drops);
    const json wide = changed(llama(), {{"hidden_size", 128}, {"num_attention_heads", 64}});
    const auto of = [&](const char* family) { return changed(wide, {{"model_type", family}}); };
    EXPECT_EQ(read(of("llama")).kv_heads, 64);
    EXPECT_EQ(read(of("mistral")).kv_heads, 8);
    EXPECT_EQ(read(of("qwen2")).kv_heads, 32);
    EXPECT_EQ(read(of("qwen3")).kv_heads, 32);
    EXPECT_EQ(read(of("mistral")).head_dim, 2);
    EXPECT_EQ(read(of("qwen2")).head_dim, 2);
    EXPECT_EQ(read(of("qwen3")).head_dim, 128);
    for (const char* family : {"llama", "mistral", "qwen2", "qwen3"})
        EXPECT_EQ(read(changed(of(family), {{"num_key_value_heads", nullptr}})).kv_heads, 64);
    const json gpt2{{"model_type", "gpt2"}, {"n_embd", 48},       {"n_layer", 2},
                    {"n_head", 3},          {"n_positions", 128}, {"vocab_size", 100}};
    const Description older = read_description(gpt2.dump(), "here");
    EXPECT_EQ(older.shape.intermediate, 192);
    EXPECT_EQ(older.shape.learned_positions, 128);
    EXPECT_TRUE(older.shape.tie_embeddings && older.shape.layer_norm && older.shape.qkv_bias);
    EXPECT_TRUE(older.drops);
}

// A frequency of RoPE for each two elements of a head: gigabytes, and seconds, for a short file.
TEST(HuggingFace, a_head_is_no_wider_than_any) {
    const json one{{"hidden_size", 1 << 30},
                   {"num_attention_heads", 1},
                   {"intermediate_size", 1},
                   {"num_hidden_layers", 1},
                   {"vocab_size", 1}};
    const json narrow = changed(one, {{"hidden_size", 1}});
    expect_refused(changed(changed(llama(), narrow), {{"head_dim", 1 << 30}}),
                   {"head_dim", "1073741824", "65536"});
    expect_refused(changed(changed(llama(), one), {{"hidden_size", 131072}}),
                   {"num_attention_heads", "65536"});
    EXPECT_EQ(read(changed(changed(llama(), narrow), {{"head_dim", 65536}})).head_dim, 65536);
}

TEST(HuggingFace, both_spellings_of_rope_say_the_same) {
    const json four{
        {"rope_theta", 5e5},
        {"rope_scaling",
         {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 64}}}};
    const json five{{"rope_parameters",
                     {{"rope_type", "yarn"},
                      {"rope_theta", 5e5},
                      {"factor", 4.0},
                      {"original_max_position_embeddings", 64}}}};
    const RopeTable a = rope_table(read(changed(llama(), four)), 256);
    const RopeTable b = rope_table(read(changed(llama(), five)), 256);
    EXPECT_EQ(a.frequencies, b.frequencies);
    EXPECT_EQ(a.amplitude, b.amplitude);
    EXPECT_GT(a.amplitude, 1);
    EXPECT_EQ(a.frequencies[0], 1);
    EXPECT_LT(a.frequencies[7], rope_table(read(llama()), 256).frequencies[7]);
}

// By tests/golden/make_rope_golden.py: in fp32, where ours is in double.
TEST(HuggingFace, frequencies_are_transformers_s) {
    std::ifstream file(FERRY_SOURCE_DIR "/tests/golden/rope.json");
    const json cases = json::parse(file);
    ASSERT_GE(cases.size(), 20u);
    for (const json& known : cases) {
        SCOPED_TRACE(known["name"].get<std::string>() + ", " + known["sequence"].dump());
        const RopeTable table = rope_table(read(known["config"]), known["sequence"].get<int64_t>());
        const auto frequencies = known["frequencies"].get<std::vector<double>>();
        EXPECT_NEAR(table.amplitude, known["amplitude"].get<double>(), 1e-12);
        ASSERT_EQ(table.frequencies.size(), frequencies.size());
        for (size_t i = 0; i < frequencies.size(); ++i)
            EXPECT_NEAR(table.frequencies[i], frequencies[i], 2e-6 * frequencies[i]) << i;
    }
}

// As transformers derives it, where the key is there and null.
TEST(HuggingFace, a_yarn_factor_of_null_is_how_much_longer_the_context_is) {
    const auto table = [](const json& factor) {
        return rope_table(read(changed(llama(), {{"rope_parameters",
                                                  {{"rope_type", "yarn"},
                                                   {"factor", factor},
                                                   {"original_max_position_embeddings", 64}}}})),
                          256);
    };
    EXPECT_EQ(table(nullptr).frequencies, table(4.0).frequencies);
    EXPECT_EQ(table(nullptr).amplitude, table(4.0).amplitude);
    EXPECT_NE(table(nullptr).frequencies, table(2.0).frequencies);
    expect_refused(changed(llama(), {{"rope_parameters", {{"rope_type", "yarn"}}}}), {"factor"});
}

TEST(HuggingFace, layers_slide_by_a_window_or_not_at_all) {
    const json types{{"layer_types", {"full_attention", "sliding_attention", "full_attention"}}};
    for (const char* family : {"qwen2", "qwen3"}) {
        const json of =
            changed(changed(llama(), {{"model_type", family}, {"num_key_value_heads", 2}}), types);
        expect_refused(of, {"layer_types", "sliding_attention", "use_sliding_window"});
        expect_refused(changed(of, {{"use_sliding_window", false}, {"sliding_window", 32}}),
                       {"layer_types", "use_sliding_window"});
        expect_refused(changed(of, {{"use_sliding_window", true}, {"sliding_window", nullptr}}),
                       {"layer_types", "sliding_window"});
        EXPECT_EQ(read(changed(of, {{"use_sliding_window", true}, {"sliding_window", 32}})).windows,
                  (std::vector<int64_t>{0, 32, 0}));
        EXPECT_TRUE(
            read(changed(of, {{"layer_types", json::array({"full_attention", "full_attention",
                                                           "full_attention"})}}))
                .windows.empty());
    }
}

TEST(HuggingFace, types_of_layers_are_looked_at_where_no_window_is) {
    const json grouped = changed(llama(), {{"num_key_value_heads", 2}});
    for (const json& without :
         {json{{"model_type", "qwen2"}},
          json{{"model_type", "qwen3"}, {"use_sliding_window", false}},
          json{{"model_type", "mistral"}, {"sliding_window", nullptr}},
          json{{"model_type", "mistral"}, {"sliding_window", 8}},
          json{{"model_type", "qwen2"}, {"use_sliding_window", true}, {"sliding_window", 8}}}) {
        const json of = changed(grouped, without);
        const auto with = [&](const json& types) { return changed(of, {{"layer_types", types}}); };
        const std::string full = "full_attention";
        EXPECT_NO_THROW(read(with(json::array({full, full, full})))) << without;
        expect_refused(with(json::array({full, "chunked_attention", full})),
                       {"layer_types", "chunked_attention"});
        expect_refused(with(json::array({full, 1, full})), {"layer_types"});
        expect_refused(with(json::array({full, full, full, full, full})), {"layer_types", "3"});
        expect_refused(with(json::array()), {"layer_types", "3"});
        expect_refused(with("sliding_attention"), {"layer_types", "list"});
        expect_refused(with({{"0", "sliding_attention"}}), {"layer_types", "list"});
    }
}

TEST(HuggingFace, rope_that_makes_no_sense_is_refused) {
    const auto with = [](const json& settings) {
        return changed(llama(), {{"rope_parameters", settings}});
    };
    expect_refused(with({{"rope_type", "spiral"}}), {"rope_type", "spiral", "longrope", "dynamic"});
    expect_refused(changed(llama(), {{"rope_scaling", {{"type", "su"}, {"factor", 2.0}}}}),
                   {"type", "su", "longrope"});
    expect_refused(with({{"rope_type", "dynamic"}}), {"factor"});
    expect_refused(with({{"full_attention", {{"rope_type", "default"}}}}), {"full_attention"});
    const json few{{"rope_type", "longrope"},
                   {"short_factor", std::vector<double>(8, 1.0)},
                   {"long_factor", std::vector<double>(7, 1.0)}};
    expect_refused(with(few), {"long_factor", "8 numbers"});
    json bad = few;
    bad["long_factor"] = {1, 1, 1, 1, 1, 1, 1, "x"};
    expect_refused(with(bad), {"long_factor", "8 numbers"});
    bad.erase("long_factor");
    expect_refused(with(bad), {"long_factor", "missing"});
    for (const char* kind : {"default", "linear", "dynamic"}) {
        expect_refused(with({{"rope_type", kind}, {"factor", 2}, {"partial_rotary_factor", 0.5}}),
                       {"partial_rotary_factor", "0.5", "proportional"});
    }
    expect_refused(changed(llama(), {{"partial_rotary_factor", 0.5}}), {"partial_rotary_factor"});
    expect_refused(with({{"rope_type", "proportional"}, {"partial_rotary_factor", 1.5}}),
                   {"partial_rotary_factor", "1.5"});
    EXPECT_EQ(read(changed(llama(), {{"partial_rotary_factor", 1}})).rope_scaling.rotated, 1);
    expect_refused(with({{"rope_type", "longrope"},
                         {"original_max_position_embeddings", 1},
                         {"short_factor", std::vector<double>(8, 1.0)},
                         {"long_factor", std::vector<double>(8, 1.0)}}),
                   {"no finite angles", "rope_parameters", "original_max_position_embeddings"});
    expect_refused(
        with({{"rope_type", "yarn"}, {"factor", 2.0}, {"rope_theta", 1}, {"truncate", false}}),
        {"no finite angles", "rope_theta"});
}

TEST(HuggingFace, rope_described_twice_must_be_alike) {
    const json both{
        {"rope_theta", 5e5},
        {"rope_parameters", {{"rope_type", "linear"}, {"factor", 2.0}, {"rope_theta", 5e5}}},
        {"rope_scaling", {{"type", "linear"}, {"factor", 2}}}};
    EXPECT_EQ(read(changed(llama(), both)).rope_scaling.factor, 2);
    json other = both;
    other["rope_scaling"]["factor"] = 4;
    expect_refused(changed(llama(), other),
                   {"rope_scaling", "twice", "4", "rope_parameters", "2.0"});
    other["rope_scaling"] = {{"type", "dynamic"}, {"factor", 2}};
    expect_refused(changed(llama(), other), {"rope_scaling", "dynamic"});
    other["rope_scaling"] = nullptr;
    EXPECT_EQ(read(changed(llama(), other)).rope_scaling.factor, 2);
}

TEST(HuggingFace, windows_by_list_and_by_the_older_rule) {
    const json grouped = changed(llama(), {{"num_key_value_heads", 2}});
    const json qwen = changed(grouped, {{"model_type", "qwen2"}, {"sliding_window", 32}});
    using Windows = std::vector<int64_t>;
    EXPECT_EQ(read(qwen).windows, Windows{});
    const json sliding = changed(qwen, {{"use_sliding_window", true}, {"max_window_layers", 1}});
    EXPECT_EQ(read(sliding).windows, (Windows{0, 32, 32}));
    const json listed = changed(
        sliding, {{"layer_types", {"sliding_attention", "full_attention", "sliding_attention"}}});
    EXPECT_EQ(read(listed).windows, (Windows{32, 0, 32}));
    expect_refused(changed(sliding, {{"layer_types", {"full_attention"}}}), {"layer_types", "3"});
    expect_refused(
        changed(sliding, {{"layer_types", {"full_attention", "chunked", "full_attention"}}}),
        {"chunked", "sliding_attention"});
    const json mistral = changed(grouped, {{"model_type", "mistral"}});
    EXPECT_EQ(read(mistral).windows, (Windows{4096, 4096, 4096}));
    EXPECT_EQ(read(changed(mistral, {{"sliding_window", nullptr}})).windows, Windows{});
}

TEST(HuggingFace, biases_are_the_familys) {
    const json asked{{"attention_bias", true}, {"mlp_bias", true}};
    const Shape own = read(changed(llama(), asked));
    EXPECT_TRUE(own.qkv_bias && own.output_bias && own.mlp_bias);
    const json grouped = changed(llama(), {{"num_key_value_heads", 2}});
    const Shape two = read(changed(changed(grouped, asked), {{"model_type", "qwen2"}}));
    EXPECT_TRUE(two.qkv_bias);
    EXPECT_FALSE(two.output_bias || two.mlp_bias || two.head_norms);
    const Shape three = read(changed(grouped, {{"model_type", "qwen3"}, {"head_dim", 20}}));
    EXPECT_TRUE(three.head_norms);
    EXPECT_EQ(three.head_dim, 20);
}

TEST(HuggingFace, the_padding_token_is_a_row_but_for_gpt2) {
    EXPECT_EQ(read(llama()).padding_token, -1);
    EXPECT_EQ(read(changed(llama(), {{"pad_token_id", nullptr}})).padding_token, -1);
    EXPECT_EQ(read(changed(llama(), {{"pad_token_id", 0}})).padding_token, 0);
    EXPECT_EQ(read(changed(llama(), {{"pad_token_id", 499}})).padding_token, 499);
    EXPECT_EQ(read(changed(llama(), {{"pad_token_id", -1}})).padding_token, 499);
    for (const json& wrong : {json(500), json(-501), json(1.5), json("</s>"), json::array({1})})
        expect_refused(changed(llama(), {{"pad_token_id", wrong}}),
                       {"pad_token_id", "-500 to 499"});
    const json gpt2{{"model_type", "gpt2"}, {"n_embd", 48},      {"n_layer", 2},     {"n_head", 3},
                    {"n_positions", 128},   {"vocab_size", 100}, {"pad_token_id", 7}};
    EXPECT_EQ(read(gpt2).padding_token, -1);
}

TEST(HuggingFace, what_is_not_supported_is_named) {
    expect_refused({{"hidden_size", 3}}, {"model_type", "null", "gpt2"});
    expect_refused(changed(llama(), {{"model_type", "phi3"}}), {"phi3", "llama, mistral"});
    expect_refused(changed(llama(), {{"num_attention_heads", 5}}), {"hidden_size 64", "5"});
    expect_refused(changed(llama(), {{"head_dim", 15}}), {"head_dim", "even"});
    expect_refused(changed(llama(), {{"rms_norm_eps", 0}}), {"rms_norm_eps"});
    EXPECT_EQ(read(changed(llama(), {{"initializer_range", 0}})).initial_deviation, 0);
    expect_refused(changed(llama(), {{"initializer_range", -1}}), {"initializer_range", "-1"});
    // fp32 has no room for some of these, and others mean nothing.
    for (const double eps : {1e300, 1e-300, 1e-39, 2.0})
        expect_refused(changed(llama(), {{"rms_norm_eps", eps}}),
                       {"rms_norm_eps", "a number of 1e-30 to 1"});
    for (const double theta : {1e300, 1e-300, 0.5})
        expect_refused(changed(llama(), {{"rope_theta", theta}}), {"rope_theta", "1e+15"});
    for (const double deviation : {1e300, 1e-300, 1000.0})
        expect_refused(changed(llama(), {{"initializer_range", deviation}}),
                       {"initializer_range", "1e-12 to 100"});
    for (const double factor : {1e300, 1e-300, 1e-8}) {
        for (const char* kind : {"linear", "dynamic", "yarn", "llama3"})
            expect_refused(
                changed(llama(), {{"rope_scaling", {{"rope_type", kind}, {"factor", factor}}}}),
                {"rope_scaling: factor", "1e-06 to 1e+06"});
    }
    for (const char* key : {"beta_fast", "beta_slow", "attention_factor"})
        expect_refused(changed(llama(), {{"rope_scaling",
                                          {{"rope_type", "yarn"}, {"factor", 2.0}, {key, 1e300}}}}),
                       {key, "1e+30"});
    expect_refused(changed(llama(), {{"hidden_size", 64.5}}), {"hidden_size", "64.5"});
    expect_refused(changed(llama(), {{"tie_word_embeddings", "yes"}}), {"tie_word_embeddings"});
    expect_refused(changed(llama(), {{"num_hidden_layers", 1000000}}),
                   {"num_hidden_layers", "1000000", "65536"});
    expect_refused(changed(llama(), {{"num_hidden_layers", 65536},
                                     {"hidden_size", 1 << 30},
                                     {"intermediate_size", 1 << 30}}),
                   {"larger than any", "here", "num_hidden_layers, hidden_size"});
    EXPECT_EQ(read(changed(llama(), {{"num_hidden_layers", 65536}})).layers, 65536);
    EXPECT_THROW(read_description("[1]", "here"), Error);
    EXPECT_THROW(read_description("{", "here"), Error);
}

TEST(HuggingFace, a_llama_written_is_the_one_read) {
    Shape s = read(changed(llama(), {{"num_key_value_heads", 2}, {"head_dim", 24}}));
    const Description back = read_description(describe_llama(s, 77, DType::bf16), "here");
    EXPECT_EQ(back.context, 77);
    EXPECT_EQ(back.shape.head_dim, 24);
    EXPECT_EQ(back.shape.kv_heads, 2);
    EXPECT_EQ(back.shape.norm_eps, s.norm_eps);
    const json typed = json::parse(with_type(llama().dump(), "here", DType::bf16));
    EXPECT_EQ(typed["torch_dtype"], "bfloat16");
    EXPECT_EQ(typed["hidden_size"], 64);
    EXPECT_FALSE(typed.contains("dtype"));
    const json both = changed(llama(), {{"dtype", "float16"}, {"torch_dtype", "float32"}});
    const json retyped = json::parse(with_type(both.dump(), "here", DType::bf16));
    EXPECT_EQ(retyped["torch_dtype"], "bfloat16");
    EXPECT_EQ(retyped["dtype"], "bfloat16");
}

}  // namespace
}  // namespace ferry::model
