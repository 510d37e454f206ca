// ferry's weights against torch.optim's: no further from torch's fp64 run than three times what
// torch's own fp32 run is, over 20 steps. Files from make_optim_golden.py.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "ferry/optim.h"

namespace ferry::optim {
namespace {

struct Golden {
    Hyper hyper{};
    std::vector<float> p0{};
    std::vector<std::vector<float>> gradients{};
    std::map<int64_t, std::vector<double>> p32{}, p64{};
};

void set_option(Hyper& hyper, const std::string& word) {
    const size_t equals = word.find('=');
    const std::string key = word.substr(0, equals), text = word.substr(equals + 1);
    if (key == "method") {
        hyper.method = method_from(text);
        return;
    }
    const double value = std::stod(text);
    if (key == "lr") hyper.lr = value;
    if (key == "beta1") hyper.beta1 = value;
    if (key == "beta2") hyper.beta2 = value;
    if (key == "eps") hyper.eps = value;
    if (key == "weight_decay") hyper.weight_decay = value;
    if (key == "momentum") hyper.momentum = value;
    if (key == "nesterov") hyper.nesterov = value != 0;
    if (key == "initial_accumulator") hyper.initial_accumulator = value;
}

template <class T>
std::vector<T> numbers(std::istringstream& words) {
    std::vector<T> values;
    for (std::string word; words >> word;) values.push_back(static_cast<T>(std::stod(word)));
    return values;
}

Golden read(const std::filesystem::path& path) {
    Golden golden;
    std::ifstream file(path);
    for (std::string text; std::getline(file, text);) {
        std::istringstream words(text);
        std::string name;
        words >> name;
        if (name == "options") {
            for (std::string word; words >> word;) set_option(golden.hyper, word);
        } else if (name == "p0") {
            golden.p0 = numbers<float>(words);
        } else if (name == "g") {
            golden.gradients.push_back(numbers<float>(words));
        } else {
            int64_t step = 0;
            words >> step;
            (name == "p32" ? golden.p32 : golden.p64)[step] = numbers<double>(words);
        }
    }
    return golden;
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
    return std::sqrt(sum);
}

double norm(const std::vector<double>& a) { return distance(a, std::vector<double>(a.size())); }

class Torch : public testing::TestWithParam<std::string> {};

TEST_P(Torch, weights_are_as_near_to_fp64_as_torchs_fp32) {
    const std::filesystem::path folder = FERRY_SOURCE_DIR "/tests/golden/optim";
    const Golden golden = read(folder / (GetParam() + ".txt"));
    ASSERT_EQ(golden.gradients.size(), 20u);
    std::vector<float> p = golden.p0, m(p.size(), initial_moment(golden.hyper)), v(p.size());
    Span span{.count = static_cast<int64_t>(p.size()),
              .p_in = p.data(),
              .m_in = m.data(),
              .v_in = v.data(),
              .p = p.data(),
              .m = m.data(),
              .v = v.data()};
    for (int64_t step = 1; step <= 20; ++step) {
        span.gradient = golden.gradients[static_cast<size_t>(step - 1)].data();
        update(span, scalars_of(golden.hyper, step, 1));
        const auto exact = golden.p64.find(step);
        if (exact == golden.p64.end()) continue;
        const double ours = distance({p.begin(), p.end()}, exact->second);
        const double theirs = distance(golden.p32.at(step), exact->second);
        const double size = norm(exact->second);
        RecordProperty("step_" + std::to_string(step), std::to_string(ours / theirs));
        EXPECT_LE(ours, 3 * theirs) << "step " << step;
        EXPECT_LE(ours, 1e-5 * size) << "step " << step;
        EXPECT_GT(distance({p.begin(), p.end()}, {golden.p0.begin(), golden.p0.end()}),
                  1e-3 * size);
    }
}

INSTANTIATE_TEST_SUITE_P(golden, Torch,
                         testing::Values("adamw", "adamw_plain", "adam_l2", "sgd", "sgd_momentum",
                                         "sgd_nesterov", "lion", "adagrad"),
                         [](const auto& one) { return one.param; });

}  // namespace
}  // namespace ferry::optim
