// The optimizers' arithmetic on the caller's arrays.
#include "ferry/optim.h"

#include <array>
#include <utility>

#include "ferry/team.h"
#include "handles.h"
#include "options.h"

namespace ferry::capi {
namespace {

struct SharedTeam {
    static constexpr HandleKind kKind = HandleKind::team;
    explicit SharedTeam(int threads) : team(threads) {}
    Team team;
};

optim::Hyper hyper_of(const ferry_hyper* hyper) {
    const ferry_hyper given = taken("hyper", hyper);
    check_choice("hyper->method", given.method, FERRY_ADAGRAD);
    check_choice("hyper->nesterov", given.nesterov, 1);
    return {.method = static_cast<optim::Method>(given.method),
            .lr = given.lr,
            .beta1 = given.beta1,
            .beta2 = given.beta2,
            .eps = given.eps,
            .weight_decay = given.weight_decay,
            .momentum = given.momentum,
            .nesterov = given.nesterov == 1,
            .initial_accumulator = given.initial_accumulator,
            .seed = given.seed};
}

struct Array {
    const char* name;
    const void* address;
    int64_t element_bytes;
    bool wanted;
};

// Arrays of `count` elements that are there where they are wanted, and in bounds of the address
// space.
void check_arrays(std::span<const Array> arrays, int64_t count) {
    for (const Array& array : arrays) {
        if (array.wanted) check_given(array.name, array.address);
        const auto end = reinterpret_cast<uintptr_t>(array.address) +
                         static_cast<uintptr_t>(count * array.element_bytes);
        if (end < reinterpret_cast<uintptr_t>(array.address))
            refuse_argument(std::string(array.name) + " ends beyond all memory",
                            std::to_string(count) + " elements", "arrays of the process");
    }
}

// The bytes of an array that are read or written.
struct Extent {
    const char* name;
    const void* address;
    int64_t bytes;
    uintptr_t begin() const { return reinterpret_cast<uintptr_t>(address); }
    uintptr_t end() const { return begin() + static_cast<uintptr_t>(bytes); }
    bool meets(const Extent& other) const {
        return address && other.address && begin() < other.end() && other.begin() < end();
    }
};

[[noreturn]] void refuse_overlap(const Extent& a, const Extent& b, const char* limit) {
    const bool first = a.begin() <= b.begin();
    refuse_argument(std::string(a.name) + " overlaps " + b.name,
                    std::to_string(first ? b.begin() - a.begin() : a.begin() - b.begin()) +
                        " bytes apart, the first of them has " +
                        std::to_string(first ? a.bytes : b.bytes),
                    limit);
}

// Checks that what is written is its own input (in place), or apart from all others.
// `outputs[i]` may be the same as `inputs[i]`; further inputs belong to none.
void check_apart(std::span<const Extent> outputs, std::span<const Extent> inputs) {
    for (size_t i = 0; i < outputs.size(); ++i) {
        const Extent& out = outputs[i];
        if (!out.address) continue;
        for (size_t j = i + 1; j < outputs.size(); ++j)
            if (out.meets(outputs[j]))
                refuse_overlap(out, outputs[j], "arrays of their own for all that is written");
        for (size_t j = 0; j < inputs.size(); ++j) {
            const bool in_place = i == j && out.address == inputs[j].address;
            if (in_place || !out.meets(inputs[j])) continue;
            refuse_overlap(inputs[j], out,
                           i == j ? "the same array, or none of its bytes"
                                  : "none of an input's bytes in what is written");
        }
    }
}

// Also on a GPU, whose kernels load whole elements.
void check_aligned(std::span<const Array> arrays) {
    for (const Array& array : arrays) {
        const auto past = reinterpret_cast<uintptr_t>(array.address) %
                          static_cast<uintptr_t>(array.element_bytes);
        if (past != 0)
            refuse_argument(std::string(array.name) + " is not aligned to its elements",
                            std::to_string(past) + " bytes past",
                            "multiples of " + std::to_string(array.element_bytes));
    }
}

constexpr int64_t kCountMax = int64_t{1} << 44;
// So many elements a layer may have for stochastic rounding, in runs of so many (optim.h).
constexpr int64_t kNoiseElements = int64_t{1} << 34, kNoiseRun = 32;

MomentType moment_type_of(int32_t type) {
    switch (type) {
        case FERRY_F32:
            return MomentType::f32;
        case FERRY_BF16:
            return MomentType::bf16;
        case FERRY_INT8:
            return MomentType::int8;
        default:
            refuse_argument("update->moment_type", std::to_string(type),
                            "FERRY_F32, FERRY_BF16 or FERRY_INT8");
    }
}

void check_element(const optim::Span& span) {
    if (span.moment_type == MomentType::f32) return;
    const bool coded = span.moment_type == MomentType::int8;
    if (!coded)
        check_range("update->element + count", span.element + span.count, 0, kNoiseElements);
    const int64_t run = coded ? kMomentBlock : kNoiseRun;
    if (span.element % run == 0) return;
    const std::string times = std::to_string(run);
    refuse_argument(
        "update->element is not at a run of " + times, std::to_string(span.element),
        "multiples of " + times + " with moments in " + std::string(name_of(span.moment_type)));
}

int64_t moment_blocks(const optim::Span& span) {
    return (span.count + kMomentBlock - 1) / kMomentBlock;
}

void check_come_together(const std::string& moment, const void* codes, const float* scales) {
    if ((codes == nullptr) == (scales == nullptr)) return;
    refuse_argument("update->" + moment + " and its scales come together",
                    codes ? "no scales" : "scales alone", "both or none, with moments in int8");
}

// Checks the scales of int8 moments, a float for each moment block.
void check_scales(const optim::Span& span, int moments) {
    if (span.moment_type != MomentType::int8) return;
    if (moments == 0 && !span.m)
        refuse_argument("update->moment_type where the method keeps no moment",
                        std::string(name_of(span.moment_type)), "FERRY_F32");
    const int64_t blocks = moment_blocks(span);
    const std::array<Array, 4> scales{{
        {"update->m_scale", span.m_scale, 4, true},
        {"update->m_scale_in", span.m_scale_in, 4, false},
        {"update->v_scale", span.v_scale, 4, moments >= 2 || span.v_scale_in},
        {"update->v_scale_in", span.v_scale_in, 4, false},
    }};
    check_arrays(scales, blocks);
    check_come_together("m", span.m, span.m_scale);
    check_come_together("v", span.v, span.v_scale);
    check_aligned(scales);
}

void check_overlaps(const optim::Span& span) {
    const int64_t n = span.count, of_m = n * size_of(span.moment_type);
    const bool coded = span.moment_type == MomentType::int8;
    const int64_t of_scales = coded ? 4 * moment_blocks(span) : 0;
    const std::array<Extent, 7> outputs{
        {{"update->p", span.p, 4 * n},
         {"update->m", span.m, of_m},
         {"update->v", span.v, of_m},
         {"update->weight", span.weight, n * size_of(span.weight_type)},
         {"update->low", span.low, 2 * n},
         {"update->m_scale", coded ? span.m_scale : nullptr, of_scales},
         {"update->v_scale", coded ? span.v_scale : nullptr, of_scales}}};
    const std::array<Extent, 8> inputs{
        {{"update->p_in", span.p_in, 4 * n},
         {"update->m_in", span.m_in, of_m},
         {"update->v_in", span.v_in, of_m},
         {"update->weight_in", span.weight_in, 2 * n},
         {"update->low_in", span.low_in, 2 * n},
         {"update->m_scale_in", coded ? span.m_scale_in : nullptr, of_scales},
         {"update->v_scale_in", coded ? span.v_scale_in : nullptr, of_scales},
         {"update->gradient", span.gradient, n * size_of(span.gradient_type)}}};
    check_apart(outputs, inputs);
}

// Checks what optim::update() takes for granted.
void check_span(const optim::Span& span, const optim::Hyper& hyper, bool on_gpu) {
    const int moments = moments_of(hyper);
    const bool split = span.low || span.low_in || span.weight_in;
    const int64_t m_bytes = size_of(span.moment_type), w_bytes = size_of(span.weight_type);
    const std::array<Array, 10> arrays{{
        {"update->gradient", span.gradient, size_of(span.gradient_type), true},
        {"update->p", span.p, 4, !split},
        {"update->p_in", span.p_in, 4, false},
        {"update->m", span.m, m_bytes, moments >= 1 || span.m_in},
        {"update->m_in", span.m_in, m_bytes, false},
        {"update->v", span.v, m_bytes, moments >= 2 || span.v_in},
        {"update->v_in", span.v_in, m_bytes, false},
        {"update->weight", span.weight, w_bytes, split},
        {"update->weight_in", span.weight_in, 2, split},
        {"update->low", span.low, 2, split},
    }};
    const Array low_in{"update->low_in", span.low_in, 2, false};
    check_arrays(arrays, span.count);
    if (split && (span.p || span.p_in))
        refuse_argument(
            std::string(span.p ? "update->p" : "update->p_in") + " and update->low are both given",
            "two masters", "p, or weight and low of a split master");
    if (split && span.weight_type == DType::f32)
        refuse_argument("update->weight_type of a split master",
                        std::string(name_of(span.weight_type)), "FERRY_BF16 or FERRY_F16");
    check_element(span);
    check_scales(span, moments);
    check_overlaps(span);
    if (!on_gpu) return;
    check_aligned(arrays);
    check_aligned({&low_in, 1});
}

optim::Span span_of(const ferry_update* update) {
    const ferry_update given = taken("update", update);
    check_range("update->count", given.count, 0, kCountMax);
    check_range("update->element", given.element, 0, kCountMax);
    const bool split = given.low || given.low_in || given.weight_in;
    const auto* own_weight = static_cast<const uint16_t*>(given.weight);
    return {.count = given.count,
            .gradient = given.gradient,
            .gradient_type = type_of("update->gradient_type", given.gradient_type),
            .moment_type = moment_type_of(given.moment_type),
            .p_in = given.p_in ? given.p_in : given.p,
            .m_in = given.m_in ? given.m_in : given.m,
            .v_in = given.v_in ? given.v_in : given.v,
            .p = given.p,
            .m = given.m,
            .v = given.v,
            .m_scale_in = given.m_scale_in ? given.m_scale_in : given.m_scale,
            .v_scale_in = given.v_scale_in ? given.v_scale_in : given.v_scale,
            .m_scale = given.m_scale,
            .v_scale = given.v_scale,
            .weight = given.weight,
            .weight_type = type_of("update->weight_type", given.weight_type),
            .weight_in = split && !given.weight_in ? own_weight : given.weight_in,
            .low_in = given.low_in ? given.low_in : given.low,
            .low = given.low,
            .layer = given.layer,
            .element = given.element};
}

template <class Run>
void run_update(const ferry_hyper* hyper, int64_t step, double gradient_scale,
                const ferry_update* update, bool on_gpu, const Run& run) {
    const optim::Hyper mine = hyper_of(hyper);
    const optim::Scalars scalars = optim::scalars_of(mine, step, gradient_scale);
    const optim::Span span = span_of(update);
    if (span.count == 0) return;
    check_span(span, mine, on_gpu);
    run(span, scalars);
}

void check_two(const Array& in, const Array& out, int64_t count, bool on_gpu) {
    check_range("count", count, 0, kCountMax);
    if (count == 0) return;
    const std::array<Array, 2> arrays{in, out};
    check_arrays(arrays, count);
    if (on_gpu) check_aligned(arrays);
}

void check_cast(const float* p, int64_t count, int32_t type, const void* weight, bool on_gpu) {
    const Array in{"p", p, 4, true},
        out{"weight", weight, size_of(type_of("weight_type", type)), true};
    check_two(in, out, count, on_gpu);
    if (count == 0) return;
    check_apart({{Extent{"weight", weight, count * out.element_bytes}}},
                {{Extent{}, Extent{"p", p, count * in.element_bytes}}});
}

void check_norms(const void* gradient, int32_t type, int64_t count, const float* leaves,
                 bool on_gpu) {
    check_two({"gradient", gradient, size_of(type_of("type", type)), true},
              {"leaves", leaves, 0, true}, count, false);
    const std::array<Array, 2> arrays{{{"gradient", gradient, size_of(type_of("type", type)), true},
                                       {"leaves", leaves, 4, true}}};
    if (on_gpu) check_aligned(arrays);
}

void check_cuda() {
    if (optim::cuda::available()) return;
    throw Error(Trouble::usage, {.what = "there is no GPU that this ferry has kernels for",
                                 .remedy = "build it with CUDA on a machine with an NVIDIA GPU, or "
                                           "use the calls without _cuda"});
}

}  // namespace
}  // namespace ferry::capi

using namespace ferry::capi;
using ferry::DType;

ferry_status ferry_team_create(int32_t threads, ferry_team** team) {
    return guarded(__func__, [&] {
        check_given("team", team);
        hand_out(team, std::make_unique<SharedTeam>(threads_of(threads)));
    });
}

ferry_status ferry_team_destroy(ferry_team* team) {
    return close_handle<SharedTeam>(__func__, team);
}

ferry_status ferry_hyper_default(int32_t method, ferry_hyper* hyper) {
    return guarded(__func__, [&] {
        check_choice("method", method, FERRY_ADAGRAD);
        check_size("hyper", hyper);
        ferry_hyper mine{};
        mine.method = method;
        mine.lr = 1e-3;
        mine.beta1 = 0.9;
        mine.beta2 = method == FERRY_LION ? 0.99 : 0.999;
        mine.eps = method == FERRY_ADAGRAD ? 1e-10 : 1e-8;
        give(hyper, mine);
    });
}

ferry_status ferry_optim_moments(const ferry_hyper* hyper, int32_t* moments, float* initial_m) {
    return guarded(__func__, [&] {
        check_given("moments", moments);
        check_given("initial_m", initial_m);
        const ferry::optim::Hyper mine = hyper_of(hyper);
        *moments = moments_of(mine);
        *initial_m = initial_moment(mine);
    });
}

ferry_status ferry_optim_moment_shares(int32_t method, int32_t moment, float* shares) {
    return guarded(__func__, [&] {
        check_choice("method", method, FERRY_ADAGRAD);
        check_choice("moment", moment, 1);
        check_given("shares", shares);
        const auto map = ferry::optim::map_of(static_cast<ferry::optim::Method>(method), moment);
        for (int code = 0; code < 256; ++code)
            shares[code] = ferry::optim::share_of(map, static_cast<uint8_t>(code));
    });
}

ferry_status ferry_optim_update(ferry_team* team, const ferry_hyper* hyper, int64_t step,
                                double gradient_scale, const ferry_update* update) {
    return guarded(__func__, [&] {
        const auto shared = team ? shared_object<SharedTeam>(team) : nullptr;
        run_update(hyper, step, gradient_scale, update, false,
                   [&](const auto& span, const auto& scalars) {
                       shared ? ferry::optim::update(shared->team, span, scalars)
                              : ferry::optim::update(span, scalars);
                   });
    });
}

ferry_status ferry_optim_update_cuda(const ferry_hyper* hyper, int64_t step, double gradient_scale,
                                     const ferry_update* update, void* stream) {
    return guarded(__func__, [&] {
        run_update(hyper, step, gradient_scale, update, true,
                   [&](const auto& span, const auto& scalars) {
                       check_cuda();
                       ferry::optim::cuda::update(span, scalars, stream);
                   });
    });
}

ferry_status ferry_optim_recast(const float* p, int64_t count, int32_t weight_type, void* weight) {
    return guarded(__func__, [&] {
        check_cast(p, count, weight_type, weight, false);
        ferry::optim::recast(p, count, static_cast<DType>(weight_type), weight);
    });
}

ferry_status ferry_optim_recast_cuda(const float* p, int64_t count, int32_t weight_type,
                                     void* weight, void* stream) {
    return guarded(__func__, [&] {
        check_cast(p, count, weight_type, weight, true);
        check_cuda();
        if (count == 0) return;
        ferry::optim::cuda::recast(p, count, static_cast<DType>(weight_type), weight, stream);
    });
}

ferry_status ferry_optim_leaf_norms(ferry_team* team, const void* gradient, int32_t type,
                                    int64_t count, float* leaves) {
    return guarded(__func__, [&] {
        const auto shared = team ? shared_object<SharedTeam>(team) : nullptr;
        check_norms(gradient, type, count, leaves, false);
        const auto of = static_cast<DType>(type);
        shared ? ferry::optim::leaf_norms(shared->team, gradient, of, count, leaves)
               : ferry::optim::leaf_norms(gradient, of, count, leaves);
    });
}

ferry_status ferry_optim_leaf_norms_cuda(const void* gradient, int32_t type, int64_t count,
                                         float* leaves, void* stream) {
    return guarded(__func__, [&] {
        check_norms(gradient, type, count, leaves, true);
        check_cuda();
        ferry::optim::cuda::leaf_norms(gradient, static_cast<DType>(type), count, leaves, stream);
    });
}

ferry_status ferry_optim_add_leaves(const float* leaves, int64_t count, double* sum) {
    return guarded(__func__, [&] {
        check_given("sum", sum);
        check_range("count", count, 0, kCountMax);
        if (count > 0) check_given("leaves", leaves);
        *sum = ferry::optim::sum_leaves({leaves, static_cast<size_t>(count)}, *sum);
    });
}

double ferry_optim_clip_factor(double norm, double max_norm) {
    return ferry::optim::clip_factor(norm, max_norm);
}
