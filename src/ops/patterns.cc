#include "ops/patterns.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/random.h"
#include "ferry/error.h"

namespace ferry::ops {
namespace {

[[noreturn]] void refuse(const std::string& key, std::string what, int64_t measured,
                         std::string limit, std::string remedy) {
    throw Error(Trouble::usage, {.what = std::move(what),
                                 .where = "attention." + key,
                                 .measured = std::to_string(measured),
                                 .limit = std::move(limit),
                                 .remedy = std::move(remedy)});
}

void check_fixed(const Pattern& p) {
    if (p.num_local_blocks % p.num_global_blocks != 0)
        refuse("num_global_blocks", "a local window is no whole number of global blocks",
               p.num_global_blocks,
               "a divisor of num_local_blocks, " + std::to_string(p.num_local_blocks),
               "choose a divisor");
    const int64_t most = p.num_local_blocks / p.num_global_blocks;
    if (p.num_different_global_patterns > most)
        refuse("num_different_global_patterns",
               "more global patterns than a local window has places",
               p.num_different_global_patterns,
               "num_local_blocks / num_global_blocks = " + std::to_string(most), "ask for fewer");
    if (p.num_different_global_patterns > 1 && !p.different_layout_per_head)
        refuse("num_different_global_patterns",
               "several global patterns, but one layout for all heads",
               p.num_different_global_patterns, "1",
               "set attention.different_layout_per_head to true");
}

void check_globals(const Pattern& p) {
    const auto &first = p.global_block_indices, &end = p.global_block_end_indices;
    if (end.empty()) return;
    if (first.size() != end.size())
        refuse("global_block_end_indices",
               "not as many ends as global_block_indices has beginnings", std::ssize(end),
               std::to_string(first.size()), "give an end for each, or none");
    for (size_t i = 0; i < end.size(); ++i) {
        if (first[i] >= end[i])
            refuse("global_block_end_indices[" + std::to_string(i) + "]",
                   "a run of global blocks that ends before it begins", end[i],
                   "more than " + std::to_string(first[i]),
                   "an end is one more than the last block");
    }
}

void check_horizontal(const Pattern& p) {
    if (p.horizontal_global_attention && !p.bidirectional)
        throw Error(Trouble::usage,
                    {.what = "horizontal global attention is of bidirectional patterns",
                     .where = "attention.horizontal_global_attention",
                     .measured = "attention.attention is \"unidirectional\"",
                     .remedy = "leave it out, or set attention.attention to "
                               "\"bidirectional\""});
}

// One layout of a pattern, a row of its own blocks at a time.
class Rows {
public:
    Rows(const Pattern& pattern, int64_t side, int64_t layer, int64_t head)
        : p_(pattern), side_(side), layer_(layer), head_(head) {
        if (p_.kind == PatternKind::variable) cut_windows();
    }

    // mark(first column, one past the last) for what the row sees; what is behind the row is cut
    // by who marks.
    template <class Mark>
    void row(int64_t row, const Mark& mark) const {
        switch (p_.kind) {
            case PatternKind::dense:
                return mark(0, row + 1);
            case PatternKind::window:
                return sliding(row, mark);
            case PatternKind::fixed:
                return fixed(row, mark);
            case PatternKind::bigbird:
                random(row, p_.bidirectional ? side_ : row + 1, mark);
                sliding(row, mark);
                mark(0, row < p_.num_global_blocks ? row + 1 : p_.num_global_blocks);
                return;
            case PatternKind::longformer:
                sliding(row, mark);
                return globals(row, true, mark);
            case PatternKind::variable:
                random(row, p_.bidirectional ? side_ : row + 1, mark);
                mark(windows_[static_cast<size_t>(row)], row + 1);
                return globals(row, p_.horizontal_global_attention, mark);
            case PatternKind::layout:
                return drawn(row, mark);
        }
    }

private:
    template <class Mark>
    void sliding(int64_t row, const Mark& mark) const {
        mark(row - p_.num_sliding_window_blocks / 2, row + 1);
    }

    // Its own window, and of every window the blocks that stand for it: the last ones; of further
    // patterns those before.
    template <class Mark>
    void fixed(int64_t row, const Mark& mark) const {
        const int64_t window = p_.num_local_blocks, count = p_.num_global_blocks;
        const int64_t own = round_down(row, window);
        const int64_t version = head_ % p_.num_different_global_patterns;
        const int64_t first = window - (1 + version) * count;
        const int64_t whole = round_down(side_, window);
        const bool horizontal = p_.horizontal_global_attention;
        const auto is_global = [&](int64_t at) { return row >= at && row < at + count; };
        for (int64_t at = first; at < std::min(own, whole); at += window) mark(at, at + count);
        mark(own, row + 1);
        if (horizontal && own < whole && is_global(own + first)) mark(0, row + 1);
        if (whole == side_) return;
        // A last window that is shorter.
        const int64_t at = std::max<int64_t>(0, std::min(whole + first, side_ - count));
        mark(at, at + count);
        if (horizontal && is_global(at)) mark(0, row + 1);
    }

    // Global columns; with `rows` global rows as well.
    template <class Mark>
    void globals(int64_t row, bool rows, const Mark& mark) const {
        for (size_t i = 0; i < p_.global_block_indices.size(); ++i) {
            const int64_t first = p_.global_block_indices[i];
            const int64_t end =
                p_.global_block_end_indices.empty() ? first + 1 : p_.global_block_end_indices[i];
            mark(first, end);
            if (rows && row >= first && row < end) mark(0, row + 1);
        }
    }

    // num_random_blocks different ones below `end`, or all: Floyd's way, from a generator of no
    // state.
    template <class Mark>
    void random(int64_t row, int64_t end, const Mark& mark) const {
        const int64_t count = std::min(p_.num_random_blocks, end);
        std::vector<int64_t> drawn;
        for (int64_t last = end - count; last < end; ++last) {
            const auto word = philox({p_.seed, Purpose::pattern},
                                     {static_cast<uint32_t>(layer_), static_cast<uint32_t>(head_),
                                      static_cast<uint32_t>(row), static_cast<uint32_t>(last)})[0];
            const auto at = static_cast<int64_t>(
                static_cast<uint64_t>(word) * static_cast<uint64_t>(last + 1) >> 32);
            const bool again = std::ranges::find(drawn, at) != drawn.end();
            drawn.push_back(again ? last : at);
            mark(drawn.back(), drawn.back() + 1);
        }
    }

    template <class Mark>
    void drawn(int64_t row, const Mark& mark) const {
        const PatternLayout& layout = *p_.layout;
        const int64_t layer = layout.layers == 1 ? 0 : layer_;
        for (int64_t column = 0; column <= row; ++column) {
            if (layout.at(layer, head_, row, column)) mark(column, column + 1);
        }
    }

    // Where the window of each row begins.
    void cut_windows() {
        size_t next = 0;
        while (std::ssize(windows_) < side_) {
            const int64_t first = std::ssize(windows_);
            const int64_t length =
                p_.local_window_blocks[std::min(next++, p_.local_window_blocks.size() - 1)];
            windows_.insert(windows_.end(), static_cast<size_t>(std::min(length, side_ - first)),
                            first);
        }
    }

    const Pattern& p_;
    int64_t side_, layer_, head_;
    std::vector<int64_t> windows_{};
};

void check_side(const Pattern& p, int64_t side) {
    const auto require = [&](const char* key, const char* sort, int64_t count) {
        if (count <= side) return;
        throw LengthRefused({.what = std::string("more ") + sort + " blocks than there are",
                             .where = std::string("attention.") + key,
                             .measured = std::to_string(count),
                             .limit = std::to_string(side) + " blocks of a sequence",
                             .remedy = "ask for fewer, or for longer sequences"});
    };
    const bool bigbird = p.kind == PatternKind::bigbird;
    if (bigbird || p.kind == PatternKind::variable)
        require("num_random_blocks", "random", p.num_random_blocks);
    if (bigbird) require("num_global_blocks", "global", p.num_global_blocks);
}

void check_layout(const PatternLayout& l, int64_t sequence, int64_t heads, int64_t layer) {
    if (l.side * l.block < sequence)
        throw LengthRefused({.what = "the layout is too small for a sequence",
                             .where = "attention.layout: " + l.where,
                             .measured = std::to_string(l.side * l.block),
                             .limit = std::to_string(sequence) + " tokens",
                             .remedy = "draw a larger one, or set batch.sequence to less"});
    const auto refuse_file = [&](std::string what, int64_t measured, std::string limit,
                                 std::string remedy) {
        throw Error(Trouble::usage, {.what = std::move(what),
                                     .where = "attention.layout: " + l.where,
                                     .measured = std::to_string(measured),
                                     .limit = std::move(limit),
                                     .remedy = std::move(remedy)});
    };
    if (l.heads != 1 && l.heads != heads)
        refuse_file("the layout has other heads than the model", l.heads,
                    "1 or " + std::to_string(heads),
                    "draw one for each query head, or one for all");
    if (l.layers != 1 && layer >= l.layers)
        refuse_file("the layout has fewer layers than the model", l.layers,
                    "1, or one for each layer", "draw one for each layer, or one for all");
}

void check_rows(const Pattern& p, const BlockLists& lists, int64_t layer) {
    if (p.allow_empty_rows) return;
    for (int64_t head = 0; head < lists.layouts; ++head) {
        for (int64_t row = 0; row < lists.blocks; ++row) {
            if (!lists.keys_of(head, row).empty()) continue;
            throw LengthRefused(
                {.what = "a row of the pattern has no block: its tokens would see nothing",
                 .where = "attention.pattern, layer " + std::to_string(layer) + ", head " +
                          std::to_string(head) + ", row " + std::to_string(row),
                 .remedy = "give it one, or set attention.allow_empty_rows to true: its "
                           "output is 0 then"});
        }
    }
}

// Places in the lists of one device's memory are 32 bits wide.
void check_count(size_t blocks) {
    constexpr size_t kMost = INT32_MAX;
    if (blocks <= kMost) return;
    throw LengthRefused({.what = "the pattern has more blocks than its lists can count",
                         .where = "attention.pattern",
                         .measured = "at least " + std::to_string(blocks),
                         .limit = std::to_string(kMost) + " blocks of a layer, of all heads",
                         .remedy =
                             "set attention.block to 128, choose a pattern with fewer blocks, "
                             "or leave out different_layout_per_head"});
}

// Columns from `first` to one before `end`.
struct Run {
    int64_t first, end;
};

// Makes lists of what rows see. Time goes by what is there, not by a row's length.
class Columns {
public:
    Columns(int64_t most, std::vector<int32_t>& all)
        : seen_(static_cast<size_t>(most)), all_(all) {}

    // Runs that meet the one before are one: rows of narrow blocks give many.
    void add(Run run) {
        if (!runs_.empty() && run.first >= runs_.back().first && run.first <= runs_.back().end) {
            runs_.back().end = std::max(runs_.back().end, run.end);
        } else {
            runs_.push_back(run);
        }
    }
    // Appends the columns of any of the row's runs, in order and each once.
    void end_row(int64_t row) {
        constexpr int64_t kFew = 64;
        if (!std::ranges::is_sorted(runs_, {}, &Run::first)) {
            if (std::ssize(runs_) > kFew) see(row);
            std::ranges::sort(runs_, {}, &Run::first);
        }
        int64_t next = 0;
        for (const Run& run : runs_) {
            const int64_t first = std::max(next, run.first);
            if (first >= run.end) continue;
            const size_t at = all_.size();
            all_.resize(at + static_cast<size_t>(run.end - first));
            std::iota(all_.begin() + static_cast<std::ptrdiff_t>(at), all_.end(),
                      static_cast<int32_t>(first));
            next = run.end;
        }
        runs_.clear();
    }

private:
    // The same columns in runs that do not meet.
    void see(int64_t row) {
        std::fill_n(seen_.begin(), row + 1, uint8_t{0});
        for (const Run& run : runs_)
            std::fill(seen_.begin() + run.first, seen_.begin() + run.end, uint8_t{1});
        runs_.clear();
        for (int64_t at = 0; at <= row; ++at) {
            if (seen_[static_cast<size_t>(at)] == 0) continue;
            const int64_t first = at;
            while (at <= row && seen_[static_cast<size_t>(at)] != 0) ++at;
            runs_.push_back({first, at});
        }
    }

    std::vector<Run> runs_{};
    std::vector<uint8_t> seen_;
    std::vector<int32_t>& all_;
};

// The lists of one layout, the transposed ones too. `side`: the pattern's own blocks, of which
// `parts` are a block of the lists.
BlockLists lists_of_head(const Pattern& pattern, int block, int64_t side, int64_t parts,
                         int64_t layer, int64_t head) {
    BlockLists lists{.block = block, .blocks = static_cast<int>(ceil_div(side, parts))};
    Columns columns(lists.blocks, lists.columns);
    const Rows rows(pattern, side, layer, head);
    lists.row_starts.push_back(0);
    for (int64_t row = 0; row < lists.blocks; ++row) {
        for (int64_t part = row * parts; part < std::min(side, (row + 1) * parts); ++part) {
            rows.row(part, [&](int64_t first, int64_t end) {
                first = std::max<int64_t>(0, first);
                end = std::min(end, part + 1);
                if (first < end) columns.add({first / parts, ceil_div(end, parts)});
            });
        }
        columns.end_row(row);
        check_count(lists.columns.size());
        lists.row_starts.push_back(static_cast<int32_t>(lists.columns.size()));
    }
    lists.transpose();
    return lists;
}

// Heads that are as many apart have one layout; 0: no two have. What differs between them is a draw
// or a file, or which blocks stand for a window.
int64_t heads_until_again(const Pattern& p) {
    switch (p.kind) {
        case PatternKind::fixed:
            return p.num_different_global_patterns;
        case PatternKind::bigbird:
        case PatternKind::variable:
            return p.num_random_blocks == 0 ? 1 : 0;
        case PatternKind::layout:
            return 0;
        case PatternKind::dense:
        case PatternKind::window:
        case PatternKind::longformer:
            return 1;
    }
    return 0;
}

// So many layouts behind each other, the i-th of them made[i % made.size()]. Each is freed once it
// has its last place.
BlockLists joined(std::vector<BlockLists> made, int64_t layouts) {
    BlockLists all{.block = made.front().block,
                   .layouts = static_cast<int>(layouts),
                   .blocks = made.front().blocks};
    size_t columns = 0;
    for (int64_t i = 0; i < layouts; ++i)
        columns += made[static_cast<size_t>(i) % made.size()].columns.size();
    check_count(columns);
    const size_t starts = static_cast<size_t>(layouts) * static_cast<size_t>(all.blocks) + 1;
    all.columns.reserve(columns);
    all.rows.reserve(columns);
    for (std::vector<int32_t>* of : {&all.row_starts, &all.column_starts}) {
        of->reserve(starts);
        of->push_back(0);
    }
    const auto append_starts = [](std::vector<int32_t>& to, const std::vector<int32_t>& from) {
        const int32_t base = to.back();
        for (size_t i = 1; i < from.size(); ++i) to.push_back(base + from[i]);
    };
    for (int64_t i = 0; i < layouts; ++i) {
        BlockLists& one = made[static_cast<size_t>(i) % made.size()];
        append_starts(all.row_starts, one.row_starts);
        append_starts(all.column_starts, one.column_starts);
        all.columns.insert(all.columns.end(), one.columns.begin(), one.columns.end());
        all.rows.insert(all.rows.end(), one.rows.begin(), one.rows.end());
        if (i + std::ssize(made) >= layouts) one = {};
    }
    return all;
}

}  // namespace

void check_pattern(const Pattern& p) {
    if (p.kind == PatternKind::fixed) check_fixed(p);
    if (p.kind == PatternKind::longformer || p.kind == PatternKind::variable) check_globals(p);
    if (p.kind == PatternKind::fixed || p.kind == PatternKind::variable) check_horizontal(p);
}

BlockLists lists_of(const Pattern& pattern, int64_t sequence, int64_t heads, int64_t layer) {
    const bool drawn = pattern.kind == PatternKind::layout;
    FERRY_CHECK(!drawn || pattern.layout != nullptr);
    if (drawn) check_layout(*pattern.layout, sequence, heads, layer);
    const int64_t fine = drawn ? pattern.layout->block : pattern.block;
    const int64_t side = ceil_div(sequence, fine), parts = listed_block(fine) / fine;
    check_pattern(pattern);
    check_side(pattern, side);
    const bool per_head = drawn ? pattern.layout->heads > 1 : pattern.different_layout_per_head;
    const int64_t of_layer = drawn || pattern.different_layout_per_layer ? layer : 0;
    const int64_t of_heads = per_head ? heads : 1, again = heads_until_again(pattern);
    const int64_t different = again > 0 ? std::min(again, of_heads) : of_heads;
    std::vector<BlockLists> made;
    for (int64_t head = 0; head < different; ++head) {
        made.push_back(lists_of_head(pattern, static_cast<int>(listed_block(fine)), side, parts,
                                     of_layer, head));
    }
    // Each as often as another, so that a mean over layouts is one over heads.
    const int64_t layouts = of_heads % different == 0 ? different : of_heads;
    BlockLists lists = layouts == 1 ? std::move(made.front()) : joined(std::move(made), layouts);
    check_rows(pattern, lists, layer);
    return lists;
}

}  // namespace ferry::ops
