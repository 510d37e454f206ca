// What the quick run leaves to the full one.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace ferry {

inline uint64_t from_environment(const char* name, uint64_t otherwise) {
    const char* text = getenv(name);
    return text ? strtoull(text, nullptr, 10) : otherwise;
}

// tools/test.sh --quick: CI has two cores and 25 minutes. Of a long list it takes a case of each
// kind.
inline bool is_quick() { return from_environment("FERRY_QUICK_TESTS", 0) != 0; }

// Of a list that is gone through in order, the quick run takes every `of`-th case; without a
// divisor in common with the lengths of the loops, it meets every value of each. `number`: of a
// suite's parameter, which share the list out.
class Spread {
public:
    explicit Spread(int of, int number = 0) : of_(is_quick() ? of : 1), count_(number) {}
    bool takes() { return count_++ % of_ == 0; }

private:
    const int of_;
    int count_;
};

}  // namespace ferry
