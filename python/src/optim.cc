// The optimizers' arithmetic on arrays of the caller's.
#include "core.h"

namespace ferry::python {
namespace {

using TeamHandle = Handle<ferry_team, ferry_team_destroy>;

int32_t method_of(const std::string& name) {
    return choice("method", name, {"adamw", "adam", "sgd", "lion", "adagrad"});
}

ferry_hyper hyper_of(const std::string& method, std::optional<double> lr,
                     std::optional<double> beta1, std::optional<double> beta2,
                     std::optional<double> eps, double weight_decay, double momentum, bool nesterov,
                     double initial_accumulator, uint32_t seed) {
    auto hyper = sized<ferry_hyper>();
    const int32_t kind = method_of(method);
    done([&] { return ferry_hyper_default(kind, &hyper); });
    hyper.lr = lr.value_or(hyper.lr);
    hyper.beta1 = beta1.value_or(hyper.beta1);
    hyper.beta2 = beta2.value_or(hyper.beta2);
    hyper.eps = eps.value_or(hyper.eps);
    hyper.weight_decay = weight_decay;
    hyper.momentum = momentum;
    hyper.nesterov = nesterov;
    hyper.initial_accumulator = initial_accumulator;
    hyper.seed = seed;
    return hyper;
}

// A closed team is refused by the C ABI, and none is no error: its mark is an address that is none.
ferry_team* ticket_of(const TeamHandle* team) {
    static char closed;
    if (!team) return nullptr;
    return team->ticket ? team->ticket : reinterpret_cast<ferry_team*>(&closed);
}

// One count for all arrays that are given.
void same_count(int64_t count, const char* name, const Array& array) {
    if (array.data && array.count != count)
        refuse(std::string(name) + " has another size than the gradient",
               std::to_string(array.count) + " elements", std::to_string(count));
}

void same_type(const char* name, const Array& array, int32_t type) {
    if (!array.data || array.type == type) return;
    static constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "uint8"};
    refuse(std::string(name) + " has another type than it must have", kNames[array.type],
           kNames[type]);
}

// A split master's weight that is read, of the type of the one that is written; uint16 is that
// type's bits.
void same_weights(const Array& in, const Array& weight) {
    if (!in.data || !weight.data) return;
    const bool are_bits =
        in.keep.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt);
    if (!are_bits) same_type("weight_in", in, weight.type);
}

// Scales of moments in int8: one a block, so of another count than all others.
void same_blocks(int64_t count, const char* name, const Array& array) {
    constexpr int64_t kBlock = 256;  // elements
    same_type(name, array, FERRY_F32);
    same_count((count + kBlock - 1) / kBlock, name, array);
}

struct Arrays {
    Array gradient, p, m, v, weight, p_in, m_in, v_in;
    Array weight_in{}, low{}, low_in{}, m_scale{}, v_scale{}, m_scale_in{}, v_scale_in{};
};

void check(const Arrays& arrays) {
    const int64_t count = arrays.gradient.count;
    same_count(count, "p", arrays.p);
    same_count(count, "m", arrays.m);
    same_count(count, "v", arrays.v);
    same_count(count, "weight", arrays.weight);
    same_count(count, "p_in", arrays.p_in);
    same_count(count, "m_in", arrays.m_in);
    same_count(count, "v_in", arrays.v_in);
    same_type("p", arrays.p, FERRY_F32);
    same_type("p_in", arrays.p_in, FERRY_F32);
    same_type("v", arrays.v, arrays.m.type);
    same_type("m_in", arrays.m_in, arrays.m.type);
    same_type("v_in", arrays.v_in, arrays.m.type);
    same_count(count, "weight_in", arrays.weight_in);
    same_count(count, "low", arrays.low);
    same_count(count, "low_in", arrays.low_in);
    same_weights(arrays.weight_in, arrays.weight);
    same_type("low", arrays.low, FERRY_BF16);
    same_type("low_in", arrays.low_in, FERRY_BF16);
    same_blocks(count, "m_scale", arrays.m_scale);
    same_blocks(count, "v_scale", arrays.v_scale);
    same_blocks(count, "m_scale_in", arrays.m_scale_in);
    same_blocks(count, "v_scale_in", arrays.v_scale_in);
}

// What the C ABI takes of them. They live as long as `arrays` does.
ferry_update call_of(const Arrays& arrays, uint32_t layer, int64_t element) {
    check(arrays);
    auto call = sized<ferry_update>();
    call.count = arrays.gradient.count;
    call.gradient = arrays.gradient.data;
    call.gradient_type = arrays.gradient.type;
    call.p_in = static_cast<const float*>(arrays.p_in.data);
    call.m_in = arrays.m_in.data;
    call.v_in = arrays.v_in.data;
    call.p = static_cast<float*>(arrays.p.data);
    call.m = arrays.m.data;
    call.v = arrays.v.data;
    call.moment_type = arrays.m.type;
    call.weight = arrays.weight.data;
    call.weight_type = arrays.weight.type;
    call.weight_in = static_cast<const uint16_t*>(arrays.weight_in.data);
    call.low = static_cast<uint16_t*>(arrays.low.data);
    call.low_in = static_cast<const uint16_t*>(arrays.low_in.data);
    call.m_scale = static_cast<float*>(arrays.m_scale.data);
    call.v_scale = static_cast<float*>(arrays.v_scale.data);
    call.m_scale_in = static_cast<const float*>(arrays.m_scale_in.data);
    call.v_scale_in = static_cast<const float*>(arrays.v_scale_in.data);
    call.layer = layer;
    call.element = element;
    return call;
}

void update(const ferry_hyper& hyper, int64_t step, nb::handle gradient, nb::handle p, nb::handle m,
            nb::handle v, nb::handle weight, double gradient_scale, nb::handle p_in,
            nb::handle m_in, nb::handle v_in, nb::handle m_scale, nb::handle v_scale,
            nb::handle m_scale_in, nb::handle v_scale_in, nb::handle low, nb::handle low_in,
            nb::handle weight_in, uint32_t layer, int64_t element, const TeamHandle* team) {
    const Arrays arrays{.gradient = floats_in("gradient", gradient, Use::reads),
                        .p = floats_in("p", p, Use::writes),
                        .m = moments_in("m", m, Use::writes),
                        .v = moments_in("v", v, Use::writes),
                        .weight = floats_in("weight", weight, Use::writes),
                        .p_in = floats_in("p_in", p_in, Use::reads),
                        .m_in = moments_in("m_in", m_in, Use::reads),
                        .v_in = moments_in("v_in", v_in, Use::reads),
                        .weight_in = floats_in("weight_in", weight_in, Use::reads),
                        .low = floats_in("low", low, Use::writes),
                        .low_in = floats_in("low_in", low_in, Use::reads),
                        .m_scale = floats_in("m_scale", m_scale, Use::writes),
                        .v_scale = floats_in("v_scale", v_scale, Use::writes),
                        .m_scale_in = floats_in("m_scale_in", m_scale_in, Use::reads),
                        .v_scale_in = floats_in("v_scale_in", v_scale_in, Use::reads)};
    const ferry_update call = call_of(arrays, layer, element);
    ferry_team* const threads = ticket_of(team);
    done([&] { return ferry_optim_update(threads, &hyper, step, gradient_scale, &call); });
}

void* stream_of(uint64_t stream) {
    return reinterpret_cast<void*>(static_cast<uintptr_t>(stream));  // NOLINT: as torch has it
}

void update_on_stream(const ferry_hyper& hyper, int64_t step, nb::handle gradient, nb::handle p,
                      nb::handle m, nb::handle v, nb::handle weight, double gradient_scale,
                      nb::handle m_scale, nb::handle v_scale, nb::handle low, uint32_t layer,
                      int64_t element, uint64_t stream) {
    const Arrays arrays{.gradient = floats_in("gradient", gradient, Use::reads, Where::gpu),
                        .p = floats_in("p", p, Use::writes, Where::gpu),
                        .m = moments_in("m", m, Use::writes, Where::gpu),
                        .v = moments_in("v", v, Use::writes, Where::gpu),
                        .weight = floats_in("weight", weight, Use::writes, Where::gpu),
                        .p_in = {},
                        .m_in = {},
                        .v_in = {},
                        .low = floats_in("low", low, Use::writes, Where::gpu),
                        .m_scale = floats_in("m_scale", m_scale, Use::writes, Where::gpu),
                        .v_scale = floats_in("v_scale", v_scale, Use::writes, Where::gpu)};
    const ferry_update call = call_of(arrays, layer, element);
    done([&] {
        return ferry_optim_update_cuda(&hyper, step, gradient_scale, &call, stream_of(stream));
    });
}

constexpr int64_t kLeaf = 4096;  // elements
int64_t leaves_of(const Array& gradient) { return (gradient.count + kLeaf - 1) / kLeaf; }

void leaf_norms_on_stream(nb::handle gradient, nb::handle leaves, uint64_t stream) {
    const Array from = floats_in("gradient", gradient, Use::reads, Where::gpu),
                to = floats_in("leaves", leaves, Use::writes, Where::gpu);
    same_type("leaves", to, FERRY_F32);
    if (to.count != leaves_of(from))
        refuse("leaves has another size than the gradient's sums",
               std::to_string(to.count) + " elements", std::to_string(leaves_of(from)));
    done([&] {
        return ferry_optim_leaf_norms_cuda(from.data, from.type, from.count,
                                           static_cast<float*>(to.data), stream_of(stream));
    });
}

double add_leaves(nb::handle leaves, double initial) {
    const Array from = floats_in("leaves", leaves, Use::reads);
    same_type("leaves", from, FERRY_F32);
    double sum = initial;
    done([&] {
        return ferry_optim_add_leaves(static_cast<const float*>(from.data), from.count, &sum);
    });
    return sum;
}

double square_sum(nb::handle gradient, double initial, const TeamHandle* team) {
    const Array array = floats_in("gradient", gradient, Use::reads);
    std::vector<float> leaves(static_cast<size_t>(leaves_of(array)));
    double sum = initial;
    ferry_team* const threads = ticket_of(team);
    done([&] {
        const ferry_status status =
            ferry_optim_leaf_norms(threads, array.data, array.type, array.count, leaves.data());
        if (status != FERRY_OK) return status;
        return ferry_optim_add_leaves(leaves.data(), static_cast<int64_t>(leaves.size()), &sum);
    });
    return sum;
}

std::vector<float> moment_shares(const std::string& method, int32_t moment) {
    const int32_t kind = method_of(method);
    std::vector<float> shares(256);
    done([&] { return ferry_optim_moment_shares(kind, moment, shares.data()); });
    return shares;
}

void recast(nb::handle p, nb::handle weight) {
    const Array from = floats_in("p", p, Use::reads), to = floats_in("weight", weight, Use::writes);
    same_type("p", from, FERRY_F32);
    same_count(from.count, "weight", to);
    done([&] {
        return ferry_optim_recast(static_cast<const float*>(from.data), from.count, to.type,
                                  to.data);
    });
}

void bind_hyper(nb::module_& module) {
    nb::class_<ferry_hyper>(module, "Hyper", "A method with its constants.")
        .def(
            "__init__",
            [](ferry_hyper* self, const std::string& method, std::optional<double> lr,
               std::optional<double> beta1, std::optional<double> beta2, std::optional<double> eps,
               double weight_decay, double momentum, bool nesterov, double initial_accumulator,
               uint32_t seed) {
                *self = hyper_of(method, lr, beta1, beta2, eps, weight_decay, momentum, nesterov,
                                 initial_accumulator, seed);
            },
            "method"_a = "adamw", "lr"_a = nb::none(), "beta1"_a = nb::none(),
            "beta2"_a = nb::none(), "eps"_a = nb::none(), "weight_decay"_a = 0.0,
            "momentum"_a = 0.0, "nesterov"_a = false, "initial_accumulator"_a = 0.0, "seed"_a = 0)
        .def_rw("lr", &ferry_hyper::lr)
        .def_rw("beta1", &ferry_hyper::beta1)
        .def_rw("beta2", &ferry_hyper::beta2)
        .def_rw("eps", &ferry_hyper::eps)
        .def_rw("weight_decay", &ferry_hyper::weight_decay)
        .def_rw("momentum", &ferry_hyper::momentum)
        .def_prop_ro(
            "moments",
            [](const ferry_hyper& self) {
                int32_t moments = 0;
                float initial = 0;
                done([&] { return ferry_optim_moments(&self, &moments, &initial); });
                return moments;
            },
            "How many the method keeps: 2 (m and v), 1 (m) or 0.")
        .def("__repr__", &shown);
}

}  // namespace

void bind_optim(nb::module_& module) {
    bind_hyper(module);
    nb::class_<TeamHandle>(module, "Team", "Threads for updates; 0: a thread a core.")
        .def(nb::new_([](int32_t threads) {
                 auto made = std::make_unique<TeamHandle>();
                 done([&] { return ferry_team_create(threads, &made->ticket); });
                 return made;
             }),
             "threads"_a = 0)
        .def("close", [](TeamHandle& self) { self.close_quietly(); });
    module.def("update", &update, "hyper"_a, "step"_a, "gradient"_a, "p"_a = nb::none(),
               "m"_a = nb::none(), "v"_a = nb::none(), "weight"_a = nb::none(), nb::kw_only(),
               "gradient_scale"_a = 1.0, "p_in"_a = nb::none(), "m_in"_a = nb::none(),
               "v_in"_a = nb::none(), "m_scale"_a = nb::none(), "v_scale"_a = nb::none(),
               "m_scale_in"_a = nb::none(), "v_scale_in"_a = nb::none(), "low"_a = nb::none(),
               "low_in"_a = nb::none(), "weight_in"_a = nb::none(), "layer"_a = 0, "element"_a = 0,
               "team"_a.none() = nb::none(),
               "The step-th update (from 1) of arrays of one size, in place or from those with "
               "_in. weight "
               "gets p, rounded to its type. Moments in uint8 are codes, with a scale for each 256 "
               "elements. A split master has low, 16 bits beside weight's, in place of p. weight "
               "is then bfloat16 or float16, and weight_in of the same type, or uint16 as its "
               "bits.");
    module.def(
        "moment_shares", &moment_shares, "method"_a, "moment"_a = 0,
        "Of moments in uint8: what the 256 codes stand for, in parts of their block's scale. "
        "`moment` is 0 for m, 1 for v.");
    module.def(
        "square_sum", &square_sum, "gradient"_a, "initial"_a = 0.0, "team"_a.none() = nb::none(),
        "initial plus the sum of squares, in a fixed order; not finite where a gradient is.");
    module.def(
        "update_on_stream", &update_on_stream, "hyper"_a, "step"_a, "gradient"_a,
        "p"_a = nb::none(), "m"_a = nb::none(), "v"_a = nb::none(), "weight"_a = nb::none(),
        nb::kw_only(), "gradient_scale"_a = 1.0, "m_scale"_a = nb::none(), "v_scale"_a = nb::none(),
        "low"_a = nb::none(), "layer"_a = 0, "element"_a = 0, "stream"_a = 0,
        "As update(), in place, of arrays on the current GPU, enqueued on a stream of CUDA's. "
        "The same bits.");
    module.def("leaf_norms_on_stream", &leaf_norms_on_stream, "gradient"_a, "leaves"_a,
               nb::kw_only(), "stream"_a = 0,
               "Sums of squares of runs of 4,096 elements, on the current GPU: add_leaves() makes "
               "square_sum() of them.");
    module.def("add_leaves", &add_leaves, "leaves"_a, "initial"_a = 0.0,
               "initial plus all leaves, in their order.");
    module.def("clip_factor", &ferry_optim_clip_factor, "norm"_a, "max_norm"_a,
               "min(1, max_norm / (norm + 1e-6)); 1 for a max_norm of 0.");
    module.def("recast", &recast, "p"_a, "weight"_a, "weight = p, rounded to its type.");
}

}  // namespace ferry::python
