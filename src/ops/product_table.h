// Which of cuBLASLt's algorithms does which product of a step: `ferry bench kernels --tune` writes
// the table, and a run whose configuration names it (numerics.products) takes no others for these.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "ops/ops.h"

namespace ferry::ops {

class ProductTable {
public:
    // As the version of the library that the table is made for lays it out.
    using Algorithm = std::array<uint64_t, 8>;

    ProductTable() = default;
    // made_for: "cuda sm_90, cuBLASLt 13.1.0".
    explicit ProductTable(std::string made_for) : made_for_(std::move(made_for)) {}
    // The text of a file. Throws usage, naming `where`, for anything that text() did not make.
    static ProductTable parse(std::string_view text, const std::string& where);

    std::string text() const;
    uint64_t hash() const;  // of the text
    const std::string& made_for() const { return made_for_; }
    bool empty() const { return of_.empty(); }
    int64_t size() const { return std::ssize(of_); }
    const Algorithm* find(const std::string& product) const;  // null: not in the table
    // A product is a line's text without ": ".
    void set(const std::string& product, const Algorithm& algorithm);

private:
    std::string made_for_{};
    std::map<std::string, Algorithm> of_{};
};

// The interface that a device's operations implement whose products can be tuned.
class TunesProducts {
public:
    virtual ~TunesProducts() = default;
    // The table that it was made with, for no GPU where it was given none.
    virtual const ProductTable& given_products() const = 0;
    // From here on the first call of a product times what the library offers for it, on its
    // operands, and the fastest does it. Not in a run: a product that is added to c is added again
    // and again.
    virtual void tune_products() = 0;
    virtual const ProductTable& tuned_products() const = 0;
};
TunesProducts* tuner_of(Ops& ops);  // null: nothing to tune, as on the CPU
// The table by which these operations do their products; null: they were given none.
const ProductTable* table_of(const Ops& ops);

}  // namespace ferry::ops
