// A model's config.json as it is written.
#include <nlohmann/json.hpp>

#include "base/json_reader.h"
#include "families.h"
#include "model/huggingface.h"

namespace ferry::model {
namespace {

std::string_view torch_name(DType type) {
    return type == DType::f32 ? "float32" : type == DType::bf16 ? "bfloat16" : "float16";
}

}  // namespace

std::string with_type(std::string_view text, const std::string& where, DType type) {
    auto config = parse_json<nlohmann::ordered_json>(text, {.where = where});
    // transformers 5 calls it dtype, and reads both: neither may be left as it was.
    const bool newer = config.contains("dtype");
    if (newer) config["dtype"] = torch_name(type);
    if (!newer || config.contains("torch_dtype")) config["torch_dtype"] = torch_name(type);
    return config.dump(2) + "\n";
}

std::string describe_llama(const Shape& s, int64_t context, DType type) {
    const nlohmann::ordered_json config{{"architectures", {names_of(Family::llama).architecture}},
                                        {"model_type", names_of(Family::llama).model_type},
                                        {"torch_dtype", torch_name(type)},
                                        {"hidden_size", s.hidden},
                                        {"intermediate_size", s.intermediate},
                                        {"num_hidden_layers", s.layers},
                                        {"num_attention_heads", s.heads},
                                        {"num_key_value_heads", s.kv_heads},
                                        {"head_dim", s.head_dim},
                                        {"vocab_size", s.vocab},
                                        {"max_position_embeddings", context},
                                        {"rms_norm_eps", s.norm_eps},
                                        {"rope_theta", s.rope_theta},
                                        {"rope_scaling", nullptr},
                                        {"hidden_act", "silu"},
                                        {"attention_bias", false},
                                        {"attention_dropout", 0.0},
                                        {"mlp_bias", false},
                                        {"tie_word_embeddings", s.tie_embeddings},
                                        {"initializer_range", s.initial_deviation},
                                        {"bos_token_id", nullptr},
                                        {"eos_token_id", nullptr},
                                        {"use_cache", true}};
    return config.dump(2) + "\n";
}

}  // namespace ferry::model
