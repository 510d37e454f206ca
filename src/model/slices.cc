// What of the tensors a rank has, where several share them.
#include <algorithm>
#include <map>
#include <memory>

#include "families.h"
#include "ferry/error.h"
#include "ferry/units.h"
#include "model/model.h"

namespace ferry::model {
namespace {

// The heads of a slice among those of the whole model.
struct Heads {
    HeadShare queries{}, keys{};
    int64_t most_queries = 0, most_keys = 0;  // of any slice: the others have zeros in their place
};

Heads heads_of(const Shape& whole, const Slicing& slicing) {
    const int64_t group = whole.heads / whole.kv_heads;
    const int holders = key_holders_of(whole, slicing.ranks);
    if (holders == 1) {
        const HeadShare keys = head_share(whole.kv_heads, slicing.ranks, slicing.rank);
        const int64_t most = ceil_div(whole.kv_heads, slicing.ranks);
        return {{keys.first * group, keys.count * group}, keys, most * group, most};
    }
    const int64_t key = slicing.rank / holders, queries = group / holders;
    return {{key * group + slicing.rank % holders * queries, queries}, {key, 1}, queries, 1};
}

HeadShare inner_share(const Shape& whole, const Slicing& slicing) {
    return head_share(whole.intermediate, slicing.ranks, slicing.rank);
}

// Rows or columns of a role's tensor that belong to heads, to the MLP's inner width or to tokens of
// the vocabulary; none: it has only the residual stream's.
struct Cut {
    std::vector<Band> bands{};
    int64_t extent = 0;    // of the slice
    bool outputs = false;  // of what the tensor gives, not of what it takes
    int holders = 1;
};

Cut cut_of(const Shape& whole, Role role, const Slicing& slicing) {
    const Heads heads = heads_of(whole, slicing);
    const int64_t d = whole.head_dim;
    const int holders = key_holders_of(whole, slicing.ranks);
    const Band queries{0, heads.queries.first * d, heads.queries.count * d};
    const Band keys{0, heads.keys.first * d, heads.keys.count * d};
    const HeadShare share = inner_share(whole, slicing);
    const Band inner{0, share.first, share.count};
    const int64_t query = heads.most_queries * d, key = heads.most_keys * d;
    const int64_t width = ceil_div(whole.intermediate, slicing.ranks);
    switch (role) {
        case Role::query:
        case Role::query_bias:
            return {{queries}, query, true};
        case Role::key:
        case Role::value:
        case Role::key_bias:
        case Role::value_bias:
            return {{keys}, key, true, holders};
        case Role::query_key_value:
        case Role::query_key_value_bias: {
            FERRY_CHECK(holders == 1, "one tensor, of which some is several ranks'");
            const int64_t q = whole.heads * d, k = whole.kv_heads * d;
            return {{queries,
                     {query, q + keys.from, keys.count},
                     {query + key, q + k + keys.from, keys.count}},
                    query + 2 * key,
                    true};
        }
        case Role::output:
            return {{queries}, query, false};
        case Role::gate:
        case Role::up:
        case Role::gate_bias:
        case Role::up_bias:
            return {{inner}, width, true};
        case Role::down:
            return {{inner}, width, false};
        case Role::token_table:
        case Role::head_table: {
            const HeadShare rows = head_share(whole.vocab, slicing.ranks, slicing.rank);
            return {{{0, rows.first, rows.count}}, ceil_div(whole.vocab, slicing.ranks), true};
        }
        default:
            return {.holders = slicing.ranks};
    }
}

int64_t product(const std::vector<int64_t>& shape) {
    int64_t all = 1;
    for (const int64_t extent : shape) all *= extent;
    return all;
}

[[noreturn]] void refuse(std::string what, const Shape& whole, int ranks, std::string limit,
                         std::string remedy) {
    throw Error(Trouble::usage,
                {.what = std::move(what),
                 .where = "parallel.tensor",
                 .measured = std::to_string(ranks) + " ranks, " + std::to_string(whole.heads) +
                             " heads over " + std::to_string(whole.kv_heads) + " of keys",
                 .limit = std::move(limit),
                 .remedy = std::move(remedy)});
}

// The most ranks, up to so many, that can share the tensors.
int nearest(const Shape& whole, int ranks) {
    const int64_t group = whole.heads / whole.kv_heads;
    while (ranks > whole.kv_heads &&
           (ranks % whole.kv_heads != 0 || group % (ranks / whole.kv_heads) != 0))
        --ranks;
    return ranks;
}

}  // namespace

int64_t Tensor::whole_count() const { return is_slice() ? product(whole) : count; }

int key_holders_of(const Shape& whole, int ranks) {
    if (whole.kv_heads == 0 || ranks <= whole.kv_heads) return 1;
    return static_cast<int>(ranks / whole.kv_heads);
}

void require_slices(const Shape& whole, int ranks) {
    if (ranks == 1) return;
    const int most = nearest(whole, ranks);
    const std::string remedy =
        "set parallel.tensor to " + std::to_string(most) + (most > 1 ? " or less" : "");
    if (ranks > whole.heads)
        refuse("more ranks share a block's tensors than it has heads", whole, ranks,
               "a rank a head", remedy);
    if (most != ranks)
        refuse("the ranks cannot divide the heads among them", whole, ranks,
               "at most one rank a head of keys, or ranks that divide the heads and are a multiple "
               "of those of keys",
               remedy);
    if (whole.intermediate < ranks)
        refuse("more ranks share the MLP than it is wide", whole, ranks,
               std::to_string(whole.intermediate), remedy);
    if (whole.vocab < ranks)
        refuse("more ranks share the vocabulary than it has tokens", whole, ranks,
               std::to_string(whole.vocab),
               "set parallel.tensor to " + std::to_string(whole.vocab) + " or less");
    if (!whole.patterns.empty() && ranks <= whole.kv_heads && whole.kv_heads % ranks != 0)
        refuse("a pattern's heads do not divide among the ranks", whole, ranks,
               "with attention.pattern, a divisor of the heads of keys",
               "set parallel.tensor to one, or attention.pattern to \"dense\"");
}

Shape slice_of(const Shape& whole, const Slicing& slicing) {
    if (slicing.ranks == 1) return whole;
    const Heads heads = heads_of(whole, slicing);
    Shape slice = whole;
    slice.heads = heads.most_queries;
    slice.kv_heads = heads.most_keys;
    slice.intermediate = ceil_div(whole.intermediate, slicing.ranks);
    std::map<const ops::BlockLists*, std::shared_ptr<const ops::BlockLists>> made;
    for (auto& pattern : slice.patterns) {
        if (!pattern) continue;
        auto& own = made[pattern.get()];
        if (!own)
            own = std::make_shared<ops::BlockLists>(
                pattern->of_heads(heads.queries.first, heads.queries.count));
        pattern = own;
    }
    return slice;
}

Tensor slice_of(const Shape& whole, Tensor tensor, const Slicing& slicing) {
    if (slicing.ranks == 1) return tensor;
    Cut cut = cut_of(whole, tensor.role, slicing);
    tensor.holders = cut.holders;
    if (cut.bands.empty()) return tensor;
    const bool of_tokens = tensor.role == Role::token_table || tensor.role == Role::head_table;
    const bool inputs_first = !of_tokens && names_of(whole.family).input_major;
    if (!tensor.is_slice()) tensor.whole = tensor.shape;
    tensor.axis = tensor.whole.size() > 1 && cut.outputs == inputs_first ? 1 : 0;
    tensor.shape = tensor.whole;
    tensor.shape[static_cast<size_t>(tensor.axis)] = cut.extent;
    std::erase_if(cut.bands, [](const Band& band) { return band.count == 0; });
    tensor.bands = std::move(cut.bands);
    tensor.count = product(tensor.shape);
    return tensor;
}

std::vector<SliceRun> runs_of(const Tensor& tensor, int64_t first, int64_t count) {
    if (!tensor.is_slice()) return {{first, first, count}};
    std::vector<SliceRun> runs;
    const int64_t end = first + count;
    const auto add = [&](int64_t at, int64_t from, int64_t elements) {
        const int64_t begin = std::max(at, first), behind = std::min(at + elements, end);
        if (begin < behind) runs.push_back({begin, from + begin - at, behind - begin});
    };
    const bool matrix = tensor.shape.size() > 1;
    if (tensor.axis == 0) {
        const int64_t row = matrix ? tensor.shape[1] : 1;
        for (const Band& band : tensor.bands) add(band.at * row, band.from * row, band.count * row);
        return runs;
    }
    const int64_t row = tensor.shape[1], whole_row = tensor.whole[1];
    for (int64_t r = first / row; r < ceil_div(end, row); ++r) {
        for (const Band& band : tensor.bands)
            add(r * row + band.at, r * whole_row + band.from, band.count);
    }
    return runs;
}

}  // namespace ferry::model
