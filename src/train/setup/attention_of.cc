#include "attention_of.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "base/checksum.h"
#include "base/log.h"
#include "base/text.h"
#include "ferry/error.h"
#include "ops/patterns.h"

namespace ferry::train {
namespace {

// ---------------------------------------------------------------- a layout's file

constexpr char kLayoutMagic[8] = {'F', 'E', 'R', 'R', 'Y', 'L', 'A', 'Y'};
constexpr uint32_t kLayoutVersion = 1;

// docs/attention.md has the format.
struct LayoutHeader {
    char magic[8]{};
    uint32_t version = 0, block = 0, layers = 0, heads = 0, rows = 0, columns = 0;
};
static_assert(sizeof(LayoutHeader) == 32);

class LayoutReader {
public:
    explicit LayoutReader(const std::string& path)
        : path_(path),
          bytes_(read_text_file(
              path,
              {.name = "the layout", .remedy = kRemedy, .most_bytes = int64_t{4} * 1024 * kMiB})) {}

    ops::PatternLayout read() const {
        const LayoutHeader h = header();
        ops::PatternLayout layout{
            .where = path_, .block = h.block, .layers = h.layers, .heads = h.heads, .side = h.rows};
        const auto cells = std::span(bytes_).subspan(sizeof h);
        layout.cells.assign(cells.begin(), cells.end());
        check_cells(layout);
        return layout;
    }

    int64_t block() const { return header().block; }

private:
    static constexpr const char* kRemedy =
        "write one with tools/write_layout.py (docs/attention.md)";

    [[noreturn]] void refuse(std::string what, std::string measured, std::string limit,
                             const std::string& place = "") const {
        throw Error(Trouble::usage, {.what = std::move(what),
                                     .where = "attention.layout: " + path_ + place,
                                     .measured = std::move(measured),
                                     .limit = std::move(limit),
                                     .remedy = kRemedy});
    }

    LayoutHeader header() const {
        LayoutHeader h;
        if (bytes_.size() < sizeof h || std::memcmp(bytes_.data(), kLayoutMagic, 8) != 0)
            refuse("not a layout", "it does not start with FERRYLAY", "");
        std::memcpy(&h, bytes_.data(), sizeof h);
        if (h.version != kLayoutVersion)
            refuse("a layout of another version", fmt::format("version {}", h.version),
                   fmt::format("version {}", kLayoutVersion));
        if (h.block != 16 && h.block != 32 && h.block != 64 && h.block != 128)
            refuse("no length of a block", fmt::format("{} tokens", h.block), "16, 32, 64 or 128");
        if (h.rows != h.columns)
            refuse("the layout is not square", fmt::format("{} x {} blocks", h.rows, h.columns),
                   "as many rows as columns");
        if (h.layers == 0 || h.heads == 0 || h.rows == 0)
            refuse("the layout is empty",
                   fmt::format("{} layers, {} heads, {} rows", h.layers, h.heads, h.rows), "");
        check_size(h);
        return h;
    }

    // By division: a damaged header must not overflow.
    void check_size(const LayoutHeader& h) const {
        uint64_t cells = bytes_.size() - sizeof h;
        bool whole = true;
        for (const uint32_t side : {h.layers, h.heads, h.rows, h.columns}) {
            whole = whole && cells % side == 0;
            cells /= side;
        }
        if (!whole || cells != 1)
            refuse("the layout is not as long as it says",
                   fmt::format("{} bytes after the header", bytes_.size() - sizeof h),
                   fmt::format("{} x {} x {} x {} cells", h.layers, h.heads, h.rows, h.columns));
    }

    void check_cells(const ops::PatternLayout& layout) const {
        const auto side = static_cast<size_t>(layout.side);
        for (size_t i = 0; i < layout.cells.size(); ++i) {
            const uint8_t cell = layout.cells[i];
            if (cell == 0) continue;
            const size_t column = i % side, row = i / side % side, head = i / side / side;
            const std::string place = fmt::format(
                ", layer {}, head {}, row {}, column {}", head / static_cast<size_t>(layout.heads),
                head % static_cast<size_t>(layout.heads), row, column);
            if (cell != 1)
                refuse("a cell that is neither 0 nor 1", std::to_string(cell), "", place);
            if (column > row)
                refuse("a block above the diagonal: no token sees a later one", "", "", place);
        }
    }

    const std::string path_, bytes_;
};

// ---------------------------------------------------------------- patterns

ops::PatternKind kind_of(AttentionPattern pattern) {
    switch (pattern) {
        case AttentionPattern::dense:
            return ops::PatternKind::dense;
        case AttentionPattern::window:
            return ops::PatternKind::window;
        case AttentionPattern::fixed:
            return ops::PatternKind::fixed;
        case AttentionPattern::bigbird:
            return ops::PatternKind::bigbird;
        case AttentionPattern::longformer:
            return ops::PatternKind::longformer;
        case AttentionPattern::variable:
            return ops::PatternKind::variable;
        case AttentionPattern::layout:
            return ops::PatternKind::layout;
    }
    bug("a pattern of attention that is none");
}

ops::Pattern pattern_of(const Config& config) {
    const AttentionConfig& a = config.attention;
    const auto wide = [](const std::vector<int>& of) {
        return std::vector<int64_t>(of.begin(), of.end());
    };
    ops::Pattern p{.kind = kind_of(a.pattern),
                   .block = a.block,
                   .different_layout_per_head = a.different_layout_per_head,
                   .different_layout_per_layer = a.different_layout_per_layer,
                   .bidirectional = a.attention == AttentionDirection::bidirectional,
                   .horizontal_global_attention = a.horizontal_global_attention,
                   .num_local_blocks = a.num_local_blocks,
                   .num_global_blocks = a.num_global_blocks,
                   .num_different_global_patterns = a.num_different_global_patterns,
                   .num_random_blocks =
                       a.num_random_blocks.value_or(a.pattern == AttentionPattern::bigbird ? 1 : 0),
                   .num_sliding_window_blocks = a.num_sliding_window_blocks,
                   .local_window_blocks = wide(a.local_window_blocks),
                   .global_block_indices = wide(a.global_block_indices),
                   .global_block_end_indices = wide(a.global_block_end_indices),
                   .allow_empty_rows = a.allow_empty_rows,
                   .seed = config.seed};
    if (p.kind == ops::PatternKind::layout)
        p.layout = std::make_shared<ops::PatternLayout>(LayoutReader(a.layout).read());
    return p;
}

bool differs_by_head(const ops::Pattern& p) {
    return p.kind == ops::PatternKind::layout ? p.layout->heads > 1 : p.different_layout_per_head;
}

bool differs_by_layer(const ops::Pattern& p) {
    return p.kind == ops::PatternKind::layout ? p.layout->layers > 1 : p.different_layout_per_layer;
}

void check_layers(const std::vector<int>& layers, int64_t of_model) {
    for (const int layer : layers) {
        if (layer < of_model) continue;
        throw Error(Trouble::usage, {.what = "the model has no such block",
                                     .where = "attention.layers",
                                     .measured = std::to_string(layer),
                                     .limit = fmt::format("0 to {}", of_model - 1),
                                     .remedy = "name blocks of the model, from 0"});
    }
}

void check_layout_layers(const ops::Pattern& p, int64_t of_model) {
    if (p.kind != ops::PatternKind::layout || p.layout->layers == 1 || p.layout->layers == of_model)
        return;
    throw Error(Trouble::usage, {.what = "the layout has other layers than the model",
                                 .where = "attention.layout: " + p.layout->where,
                                 .measured = std::to_string(p.layout->layers),
                                 .limit = fmt::format("1 or {}", of_model),
                                 .remedy = "draw one for each layer, or one for all"});
}

// Documents and windows hide what is far: of a block that does not see itself some tokens could be
// left with nothing.
void check_diagonal(const ops::BlockLists& lists, const Config& config, const model::Shape& shape,
                    int64_t layer) {
    const bool hides = config.data.isolate_documents || shape.window_of(layer) > 0;
    if (!hides || config.attention.allow_empty_rows) return;
    for (int64_t head = 0; head < lists.layouts; ++head) {
        for (int64_t row = 0; row < lists.blocks; ++row) {
            if (lists.sees(head, row, row)) continue;
            throw ops::LengthRefused(
                {.what = "a block that does not see itself: a document or a window may "
                         "leave its tokens nothing to see",
                 .where =
                     fmt::format("attention.pattern, layer {}, head {}, row {}", layer, head, row),
                 .remedy = "draw the diagonal, or set attention.allow_empty_rows to true"});
        }
    }
}

// As if each head had lists of its own, behind those of the head before: so it does not say how
// often one layout is kept.
void add_lists(RunningChecksum& sum, const ops::BlockLists& lists, int64_t heads) {
    const auto blocks = static_cast<size_t>(lists.blocks);
    const auto starts_of = [&](int64_t head) {
        const auto layout = static_cast<size_t>(head % lists.layouts);
        return std::span(lists.row_starts).subspan(layout * blocks, blocks + 1);
    };
    std::vector<int32_t> starts{0};
    for (int64_t head = 0; head < heads; ++head) {
        const std::span<const int32_t> own = starts_of(head);
        const auto base = static_cast<uint32_t>(starts.back());
        starts.resize(1);
        for (const int32_t start : own.subspan(1))
            starts.push_back(static_cast<int32_t>(base + static_cast<uint32_t>(start - own[0])));
        sum.add(std::as_bytes(std::span(starts).subspan(head == 0 ? 0 : 1)));
    }
    for (int64_t head = 0; head < heads; ++head) {
        const std::span<const int32_t> own = starts_of(head);
        sum.add(std::as_bytes(std::span(lists.columns)
                                  .subspan(static_cast<size_t>(own.front()),
                                           static_cast<size_t>(own.back() - own.front()))));
    }
}

uint64_t checksum_of(const model::Shape& shape, bool per_head) {
    RunningChecksum sum;
    const ops::BlockLists* before = nullptr;
    const auto heads = static_cast<int32_t>(per_head ? shape.heads : 1);
    for (const auto& lists : shape.patterns) {
        const std::array<int32_t, 4> head{lists ? lists->block : 0, lists ? heads : 0,
                                          lists ? lists->blocks : 0, lists.get() == before};
        sum.add(std::as_bytes(std::span(head)));
        if (lists && lists.get() != before) add_lists(sum, *lists, heads);
        before = lists.get();
    }
    return sum.value();
}

constexpr const char* name_of(ops::PatternKind kind) {
    constexpr std::array kNames{"dense",      "window",   "fixed", "bigbird",
                                "longformer", "variable", "layout"};
    return kNames[static_cast<size_t>(kind)];
}

}  // namespace

void set_patterns(model::Shape& shape, const Config& config) {
    shape.patterns.clear();
    shape.pattern_text.clear();
    if (config.attention.pattern == AttentionPattern::dense) return;
    const ops::Pattern pattern = pattern_of(config);
    const std::vector<int>& layers = config.attention.layers;
    check_layers(layers, shape.layers);
    check_layout_layers(pattern, shape.layers);
    std::shared_ptr<const ops::BlockLists> shared;
    for (int64_t layer = 0; layer < shape.layers; ++layer) {
        const bool has = layers.empty() || std::ranges::count(layers, layer) > 0;
        if (has && (!shared || differs_by_layer(pattern))) {
            shared = std::make_shared<ops::BlockLists>(
                ops::lists_of(pattern, config.batch.sequence, shape.heads, layer));
        }
        if (has) check_diagonal(*shared, config, shape, layer);
        shape.patterns.push_back(has ? shared : nullptr);
    }
    shape.pattern_text = fmt::format("{} {:016x}", name_of(pattern.kind),
                                     checksum_of(shape, differs_by_head(pattern)));
}

void warn_of_layout(const Config& config) {
    if (config.attention.pattern != AttentionPattern::layout) return;
    const int64_t block = LayoutReader(config.attention.layout).block();
    if (ops::listed_block(block) == block) return;
    log_warn(
        fmt::format("{} has blocks of {}: widened to {}, what a block of those sees in part "
                    "it sees whole",
                    config.attention.layout, block, ops::listed_block(block)));
}

}  // namespace ferry::train
