#include "families.h"

#include <algorithm>

namespace ferry::model {
namespace {

using enum Role;

// The names of llama and all that follow it; the shape says which of them a model has.
constexpr TensorName kLlamaNames[] = {
    {token_table, "embed_tokens.weight"},
    {head_table, "lm_head.weight"},
    {query, "self_attn.q_proj.weight"},
    {key, "self_attn.k_proj.weight"},
    {value, "self_attn.v_proj.weight"},
    {output, "self_attn.o_proj.weight"},
    {gate, "mlp.gate_proj.weight"},
    {up, "mlp.up_proj.weight"},
    {down, "mlp.down_proj.weight"},
    {attention_norm, "input_layernorm.weight"},
    {mlp_norm, "post_attention_layernorm.weight"},
    {final_norm, "norm.weight"},
    {query_norm, "self_attn.q_norm.weight"},
    {key_norm, "self_attn.k_norm.weight"},
    {query_bias, "self_attn.q_proj.bias"},
    {key_bias, "self_attn.k_proj.bias"},
    {value_bias, "self_attn.v_proj.bias"},
    {output_bias, "self_attn.o_proj.bias"},
    {gate_bias, "mlp.gate_proj.bias"},
    {up_bias, "mlp.up_proj.bias"},
    {down_bias, "mlp.down_proj.bias"},
};

constexpr TensorName kGpt2Names[] = {
    {token_table, "wte.weight"},        {position_table, "wpe.weight"},
    {head_table, "lm_head.weight"},     {query_key_value, "attn.c_attn.weight"},
    {output, "attn.c_proj.weight"},     {up, "mlp.c_fc.weight"},
    {down, "mlp.c_proj.weight"},        {attention_norm, "ln_1.weight"},
    {attention_norm_bias, "ln_1.bias"}, {mlp_norm, "ln_2.weight"},
    {mlp_norm_bias, "ln_2.bias"},       {final_norm, "ln_f.weight"},
    {final_norm_bias, "ln_f.bias"},     {query_key_value_bias, "attn.c_attn.bias"},
    {output_bias, "attn.c_proj.bias"},  {up_bias, "mlp.c_fc.bias"},
    {down_bias, "mlp.c_proj.bias"},
};

// clang-format off
constexpr FamilyNames kFamilies[] = {
    {Family::llama,   "llama",   "LlamaForCausalLM",   "model.",       "layers.", false, kLlamaNames},
    {Family::mistral, "mistral", "MistralForCausalLM", "model.",       "layers.", false, kLlamaNames},
    {Family::qwen2,   "qwen2",   "Qwen2ForCausalLM",   "model.",       "layers.", false, kLlamaNames},
    {Family::qwen3,   "qwen3",   "Qwen3ForCausalLM",   "model.",       "layers.", false, kLlamaNames},
    {Family::gpt2,    "gpt2",    "GPT2LMHeadModel",    "transformer.", "h.",      true,  kGpt2Names},
};
// clang-format on

}  // namespace

std::span<const FamilyNames> families() { return kFamilies; }

const FamilyNames& names_of(Family family) {
    const auto* found = std::ranges::find(kFamilies, family, &FamilyNames::family);
    FERRY_CHECK(found != std::end(kFamilies));
    return *found;
}

std::string full_name(const FamilyNames& family, const TensorName& tensor, int64_t block) {
    std::string full(tensor.role == head_table ? "" : family.prefix);
    if (block >= 0) full.append(family.block).append(std::to_string(block)).append(".");
    return full.append(tensor.name);
}

}  // namespace ferry::model
