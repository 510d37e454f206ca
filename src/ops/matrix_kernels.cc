// The processors'.
#include "matrix_kernels.h"

#include <algorithm>
#include <cmath>

#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry::ops {
namespace {

constexpr int64_t kPart = 64 * kKiB;  // elements, a thread's at a time
constexpr int64_t kLeaf = 4096;

class CpuMatrixKernels final : public MatrixKernels {
public:
    explicit CpuMatrixKernels(Team& team) : team_(team), ops_(make_cpu_ops(team)) {}
    Ops& ops() override { return *ops_; }

    void divide_by_norm(float* x, int64_t count, float* leaves, float least) override {
        double sum = 0;
        for (int64_t i = 0; i < ceil_div(count, kLeaf); ++i) sum += leaves[i];
        const auto norm = static_cast<float>(std::max(std::sqrt(sum), double{least}));
        team_.parallel(ceil_div(count, kPart), [&](int64_t part) {
            const int64_t end = std::min(count, (part + 1) * kPart);
            for (int64_t i = part * kPart; i < end; ++i) x[i] /= norm;
        });
    }

    void polynomial(float a, float b, float c, const float* gram, float* square,
                    int64_t side) override {
        team_.parallel(side, [&](int64_t row) {
            const int64_t first = row * side;
            for (int64_t i = first; i < first + side; ++i) square[i] = b * gram[i] + c * square[i];
            square[first + row] += a;
        });
    }

    void send(float*, const float*, int64_t) override { bug("one memory"); }
    void fetch(float*, const float*, int64_t) override { bug("one memory"); }

private:
    Team& team_;
    const std::unique_ptr<Ops> ops_;  // beside the model's, which may be another device's
};

}  // namespace

std::unique_ptr<MatrixKernels> make_cpu_matrix_kernels(Team& team) {
    return std::make_unique<CpuMatrixKernels>(team);
}

}  // namespace ferry::ops
