#include "ops/product_table.h"

#include <charconv>
#include <cstdio>
#include <span>

#include "base/checksum.h"
#include "base/text.h"
#include "ferry/error.h"

namespace ferry::ops {
namespace {

constexpr std::string_view kHeading = "ferry products 1; ";
constexpr std::string_view kBetween = ": ";

std::string hexadecimal(uint64_t word) {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(word));
    return text;
}

class Reader {
public:
    Reader(std::string_view text, const std::string& where) : text_(text), where_(where) {}

    ProductTable read() {
        const std::string_view heading = line();
        if (!heading.starts_with(kHeading)) refuse("no table of products", heading);
        ProductTable table{std::string(heading.substr(kHeading.size()))};
        while (!text_.empty()) {
            const std::string_view entry = line();
            const size_t at = entry.rfind(kBetween);
            if (at == std::string_view::npos || at == 0) refuse("no product", entry);
            const std::string product(entry.substr(0, at));
            if (table.find(product) != nullptr) refuse("a product for the second time", entry);
            table.set(product, algorithm(entry.substr(at + kBetween.size()), entry));
        }
        return table;
    }

private:
    std::string_view line() {
        ++number_;
        const size_t end = text_.find('\n');
        if (end == std::string_view::npos) refuse("the end of the line is missing", text_);
        const std::string_view found = text_.substr(0, end);
        text_.remove_prefix(end + 1);
        return found;
    }

    ProductTable::Algorithm algorithm(std::string_view words, std::string_view entry) const {
        constexpr size_t kDigits = 16;
        ProductTable::Algorithm found{};
        if (words.size() != found.size() * (kDigits + 1) - 1) refuse("no algorithm", entry);
        for (size_t i = 0; i < found.size(); ++i) {
            const char* first = words.data() + i * (kDigits + 1);
            const auto [end, error] = std::from_chars(first, first + kDigits, found[i], 16);
            const bool ends = i + 1 == found.size() || *(first + kDigits) == ' ';
            if (error != std::errc() || end != first + kDigits || !ends)
                refuse("no algorithm", entry);
        }
        return found;
    }

    [[noreturn]] void refuse(const std::string& what, std::string_view measured) const {
        throw Error(Trouble::usage,
                    {.what = "the table of products holds " + what,
                     .where = "numerics.products: " + where_ + ", line " + std::to_string(number_),
                     .measured = in_quotes(measured),
                     .remedy = "write one with ferry bench kernels --tune"});
    }

    std::string_view text_;
    const std::string& where_;
    int64_t number_ = 0;
};

}  // namespace

ProductTable ProductTable::parse(std::string_view text, const std::string& where) {
    return Reader(text, where).read();
}

std::string ProductTable::text() const {
    std::string text = std::string(kHeading) + made_for_ + "\n";
    for (const auto& [product, algorithm] : of_) {
        text += product + std::string(kBetween);
        for (size_t i = 0; i < algorithm.size(); ++i)
            text += hexadecimal(algorithm[i]) + (i + 1 < algorithm.size() ? " " : "\n");
    }
    return text;
}

uint64_t ProductTable::hash() const {
    const std::string all = text();
    return checksum(std::as_bytes(std::span(all)));
}

const ProductTable::Algorithm* ProductTable::find(const std::string& product) const {
    const auto found = of_.find(product);
    return found == of_.end() ? nullptr : &found->second;
}

void ProductTable::set(const std::string& product, const Algorithm& algorithm) {
    of_[product] = algorithm;
}

TunesProducts* tuner_of(Ops& ops) { return dynamic_cast<TunesProducts*>(&ops); }

const ProductTable* table_of(const Ops& ops) {
    const auto* tuner = dynamic_cast<const TunesProducts*>(&ops);
    if (tuner == nullptr || tuner->given_products().made_for().empty()) return nullptr;
    return &tuner->given_products();
}

}  // namespace ferry::ops
