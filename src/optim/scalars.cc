#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>
#include <utility>

#include "base/words.h"
#include "ferry/error.h"
#include "ferry/optim.h"
#include "internal.h"

namespace ferry::optim {
namespace {

// A gradient below this leaves no trace in v or Adagrad's sum, as its share is flushed. A smaller
// divisor would let it move the weight by many times the learning rate.
double least_eps(const Hyper& hyper) {
    const double share = hyper.method == Method::adagrad ? 1 : 1 - hyper.beta2;
    return std::sqrt(double{kLeastMoment} / share);
}

constexpr std::pair<Method, std::string_view> kMethods[] = {{Method::adamw, "adamw"},
                                                            {Method::adam, "adam"},
                                                            {Method::sgd, "sgd"},
                                                            {Method::lion, "lion"},
                                                            {Method::adagrad, "adagrad"},
                                                            {Method::muon, "muon"},
                                                            {Method::onebit_adam, "onebit_adam"},
                                                            {Method::zeroone_adam, "zeroone_adam"}};

std::string text_of(double value) {
    std::ostringstream text;
    text << std::setprecision(10) << value;
    return text.str();
}

[[noreturn]] void refuse(std::string_view name, double value, std::string limit,
                         std::string remedy) {
    throw Error(Trouble::usage,
                {.what = "the optimizer's " + std::string(name) + " defines no update",
                 .where = "optimizer." + std::string(name),
                 .measured = text_of(value),
                 .limit = std::move(limit),
                 .remedy = std::move(remedy)});
}

void need_not_negative(std::string_view name, double value) {
    if (value >= 0 && value <= std::numeric_limits<float>::max()) return;
    refuse(name, value, "0 or more, and finite in fp32", "set it to such a number");
}

void need_fraction(std::string_view name, double value) {
    if (value >= 0 && static_cast<float>(value) < 1) return;
    refuse(name, value, "0 <= " + std::string(name) + " < 1, in fp32 too (at most 1 - 2^-24)",
           "at 1 the average would never take in a gradient; common values are 0.9 to 0.999");
}

void check(const Hyper& hyper, int64_t step, double gradient_scale) {
    if (step < 1) {
        refuse("step", static_cast<double>(step), "1 or more",
               "count updates from 1: bias correction divides by 1 - beta^step");
    }
    need_not_negative("lr", hyper.lr);
    need_not_negative("eps", hyper.eps);
    need_not_negative("weight_decay", hyper.weight_decay);
    need_not_negative("initial_accumulator", hyper.initial_accumulator);
    need_not_negative("gradient_scale", gradient_scale);
    need_fraction("beta1", hyper.beta1);
    need_fraction("beta2", hyper.beta2);
    need_fraction("momentum", hyper.momentum);
    if (hyper.method == Method::sgd && hyper.nesterov && hyper.momentum == 0) {
        refuse("nesterov", 1, "momentum above 0", "set momentum, or nesterov to false");
    }
}

// Denormal scalars would make the loop slow and depend on the processor's flush mode.
float rounded(double value) {
    const float nearest = static_cast<float>(value);
    return std::fabs(nearest) < std::numeric_limits<float>::min() ? 0.0f : nearest;
}

// Checks that every scalar is finite in fp32.
void need_finite(const Scalars& scalars, const Hyper& hyper) {
    if (!std::isfinite(scalars.step_size)) {
        refuse("lr", hyper.lr, "lr / (1 - beta1^step) finite in fp32", "set a smaller lr");
    }
    if (!std::isfinite(scalars.decay)) {
        refuse("weight_decay", hyper.weight_decay, "lr * weight_decay finite in fp32",
               "set a smaller weight_decay or lr");
    }
}

void set_betas(Scalars& scalars, double beta1, double beta2) {
    scalars.beta1 = rounded(beta1);
    scalars.one_minus_beta1 = rounded(1 - beta1);
    scalars.beta2 = rounded(beta2);
    scalars.one_minus_beta2 = rounded(1 - beta2);
}

}  // namespace

Scalars scalars_of(const Hyper& hyper, int64_t step, double gradient_scale) {
    check(hyper, step, gradient_scale);
    Scalars scalars;
    scalars.method = hyper.method;
    scalars.seed = hyper.seed;
    scalars.update = static_cast<uint32_t>(step);
    scalars.gradient_scale = rounded(gradient_scale);
    scalars.eps = rounded(std::max(hyper.eps, least_eps(hyper)));
    scalars.step_size = rounded(hyper.lr);
    const bool decoupled = hyper.method == Method::adamw || hyper.method == Method::lion;
    scalars.decay = decoupled ? rounded(1 - hyper.lr * hyper.weight_decay) : 1.0f;
    scalars.weight_decay = decoupled ? 0.0f : rounded(hyper.weight_decay);
    switch (hyper.method) {
        case Method::adamw:
        case Method::adam: {
            set_betas(scalars, hyper.beta1, hyper.beta2);
            const auto t = static_cast<double>(step);
            scalars.step_size = rounded(hyper.lr / (1 - std::pow(hyper.beta1, t)));
            scalars.inv_sqrt_bias2 = rounded(1 / std::sqrt(1 - std::pow(hyper.beta2, t)));
            break;
        }
        case Method::lion:
            set_betas(scalars, hyper.beta1, hyper.beta2);
            break;
        case Method::sgd:
            scalars.beta1 = rounded(hyper.momentum);
            scalars.nesterov = hyper.nesterov;
            break;
        case Method::muon:
            scalars.gradient_scale = rounded(gradient_scale * (1 - hyper.momentum));
            scalars.beta1 = rounded(hyper.momentum);
            scalars.nesterov = hyper.nesterov;
            break;
        case Method::adagrad:
            break;
        case Method::onebit_adam:
        case Method::zeroone_adam:
            FERRY_CHECK(false, "its updates are AdamW's");
    }
    need_finite(scalars, hyper);
    return scalars;
}

Scalars muon_momentum(const Scalars& muon) {
    FERRY_CHECK(muon.method == Method::muon);
    Scalars pass = muon;
    pass.method = Method::sgd;
    pass.step_size = -1;  // p = 0 becomes the move itself
    pass.weight_decay = 0;
    return pass;
}

Scalars muon_step(const Scalars& muon, double factor) {
    FERRY_CHECK(muon.method == Method::muon && factor > 0);
    return {.method = Method::sgd,
            .step_size = rounded(double{muon.step_size} * factor),
            .weight_decay = rounded(double{muon.weight_decay} / factor),
            .seed = muon.seed,
            .update = muon.update};
}

double adjust_lr_factor(AdjustLr adjust, int64_t rows, int64_t cols) {
    const auto r = static_cast<double>(rows), c = static_cast<double>(cols);
    switch (adjust) {
        case AdjustLr::original:
            return std::sqrt(std::max(1.0, r / c));
        case AdjustLr::match_rms_adamw:
            return 0.2 * std::sqrt(std::max(r, c));
        case AdjustLr::spectral_unclamped:
            return std::sqrt(r / c);
    }
    bug("unknown adjustment of the learning rate");
}

int moments_of(Method method) {
    return method == Method::adamw || method == Method::adam || method == Method::muon ? 2 : 1;
}

int moments_of(const Hyper& hyper) {
    return hyper.method == Method::sgd && hyper.momentum == 0 ? 0 : moments_of(hyper.method);
}

float initial_moment(const Hyper& hyper) {
    return hyper.method == Method::adagrad ? rounded(hyper.initial_accumulator) : 0.0f;
}

std::string_view name_of(Method method) { return kMethods[static_cast<size_t>(method)].second; }

Method method_from(std::string_view name) {
    std::vector<std::string> known;
    for (const auto& [method, word] : kMethods) {
        // Whole matrices, which a run of elements is not; an exchange, which no update is.
        if (method == Method::muon || sends_momentum(method)) continue;
        if (word == name) return method;
        known.emplace_back(word);
    }
    const std::string near = nearest_word(name, known);
    std::string list;
    for (const std::string& word : known) list += (list.empty() ? "" : ", ") + word;
    throw Error(Trouble::usage,
                {.what = "unknown optimizer \"" + std::string(name) + "\"",
                 .where = "optimizer.method",
                 .limit = "one of " + list,
                 .remedy = near.empty() ? "choose one of them" : "did you mean \"" + near + "\"?"});
}

double sum_leaves(std::span<const float> leaves, double initial) {
    double sum = initial;
    for (const float leaf : leaves) sum += static_cast<double>(leaf);
    return sum;
}

double clip_factor(double norm, double max_norm) {
    if (!(max_norm > 0)) return 1;
    const double factor = max_norm / (norm + 1e-6);
    return factor >= 1 ? 1 : factor;  // a NaN norm has a NaN factor, which scalars_of refuses
}

}  // namespace ferry::optim
