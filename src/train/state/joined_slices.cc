#include "joined_slices.h"

#include <algorithm>
#include <vector>

#include "comm/comm.h"
#include "ferry/units.h"

namespace ferry::train {
namespace {

constexpr int64_t kTogether = kMiB;  // elements of the whole tensor

// Elements [first, first + count) of a slice: all that some rows of the whole tensor have there.
// `rows` rows from `first_row` on.
std::vector<model::SliceRun> parts_of(const model::Tensor& slice, int64_t first_row, int64_t rows) {
    const int64_t row = slice.shape.size() > 1 ? slice.shape[1] : 1;
    std::vector<model::SliceRun> parts;
    if (slice.axis == 1) {
        if (!slice.bands.empty()) parts.push_back({first_row * row, 0, rows * row});
        return parts;
    }
    for (const model::Band& band : slice.bands) {
        const int64_t begin = std::max(first_row, band.from),
                      end = std::min(first_row + rows, band.from + band.count);
        if (begin < end)
            parts.push_back({(band.at + begin - band.from) * row, 0, (end - begin) * row});
    }
    return parts;
}

int64_t elements_of(const std::vector<model::SliceRun>& parts) {
    int64_t all = 0;
    for (const model::SliceRun& part : parts) all += part.count;
    return all;
}

// Puts a slice's array of some rows, part behind part, to its places among the whole tensor's.
void place(const model::Tensor& slice, const std::vector<model::SliceRun>& parts, int64_t width,
           std::span<const std::byte> values, int64_t first_of_whole, std::span<std::byte> whole) {
    for (const model::SliceRun& part : parts) {
        for (const model::SliceRun& run : model::runs_of(slice, part.at, part.count))
            std::ranges::copy(values.subspan(static_cast<size_t>((run.at - part.at) * width),
                                             static_cast<size_t>(run.count * width)),
                              whole.begin() + (run.from - first_of_whole) * width);
        values = values.subspan(static_cast<size_t>(part.count * width));
    }
}

class Join {
public:
    Join(comm::Communicator& ranks, Executor& executor, const SlicedModel& model,
         const model::Tensor& tensor, std::span<const Width> widths, const ArraySource& mine)
        : ranks_(ranks),
          executor_(executor),
          own_(model.slicing.rank),
          first_rank_(ranks.rank() - own_),
          tensor_(tensor),
          mine_(mine),
          sent_(widths.size()),
          whole_(widths.size()),
          all_(static_cast<size_t>(ranks.size() * comm::Communicator::kAgreedBytes)) {
        for (const Width& width : widths) {
            FERRY_CHECK(width.elements == 1, "slices are cut between any two elements");
            widths_.push_back(width.bytes);
        }
        for (int rank = 0; rank < model.slicing.ranks; ++rank)
            slices_.push_back(model::slice_of(model.whole, tensor, {model.slicing.ranks, rank}));
    }

    // Rows of the whole tensor, of each array.
    std::vector<std::span<const std::byte>> rows(int64_t first, int64_t count) {
        const int64_t row = tensor_.whole.size() > 1 ? tensor_.whole[1] : 1;
        std::vector<std::vector<model::SliceRun>> parts;
        int64_t most = 0;
        for (const model::Tensor& slice : slices_) {
            parts.push_back(parts_of(slice, first, count));
            most = std::max(most, elements_of(parts.back()));
        }
        read(parts[static_cast<size_t>(own_)]);
        std::vector<std::span<const std::byte>> arrays;
        for (size_t a = 0; a < widths_.size(); ++a) {
            sent_[a].resize(static_cast<size_t>(most * widths_[a]));
            whole_[a].assign(static_cast<size_t>(count * row * widths_[a]), std::byte{});
            const auto values = exchange(sent_[a]);
            for (size_t rank = 0; rank < slices_.size(); ++rank)
                place(slices_[rank], parts[rank], widths_[a], values[rank], first * row, whole_[a]);
            arrays.emplace_back(whole_[a]);
        }
        return arrays;
    }

private:
    void read(const std::vector<model::SliceRun>& parts) {
        for (std::vector<std::byte>& array : sent_) array.clear();
        for (const model::SliceRun& part : parts) {
            mine_({tensor_.offset + part.at, part.count},
                  [this](std::span<const std::span<const std::byte>> arrays) {
                      for (size_t a = 0; a < arrays.size(); ++a)
                          sent_[a].insert(sent_[a].end(), arrays[a].begin(), arrays[a].end());
                  });
        }
    }

    // Of every slice, as this rank's neighbours have it.
    std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> mine) {
        std::vector<std::vector<std::byte>> values(slices_.size());
        while (!mine.empty()) {
            const auto here = std::min(mine.size(), size_t{comm::Communicator::kAgreedBytes});
            const auto all = std::span(all_).first(here * static_cast<size_t>(ranks_.size()));
            comm::agree(ranks_, executor_, mine.first(here), all, {.of = "slices of a tensor"});
            for (size_t rank = 0; rank < values.size(); ++rank) {
                const auto its =
                    all.subspan((static_cast<size_t>(first_rank_) + rank) * here, here);
                values[rank].insert(values[rank].end(), its.begin(), its.end());
            }
            mine = mine.subspan(here);
        }
        return values;
    }

    comm::Communicator& ranks_;
    Executor& executor_;
    const int own_, first_rank_;
    const model::Tensor& tensor_;
    const ArraySource& mine_;
    std::vector<int64_t> widths_{};  // bytes of an element
    std::vector<model::Tensor> slices_{};
    std::vector<std::vector<std::byte>> sent_, whole_;
    std::vector<std::byte> all_;
};

}  // namespace

void join_arrays(comm::Communicator& ranks, Executor& executor, const SlicedModel& model,
                 const model::Tensor& tensor, std::span<const Width> widths,
                 const ArraySource& mine, const ArraySink& sink) {
    const int64_t row = tensor.whole.size() > 1 ? tensor.whole[1] : 1;
    const int64_t rows = tensor.whole[0], together = std::max<int64_t>(1, kTogether / row);
    Join join(ranks, executor, model, tensor, widths, mine);
    for (int64_t first = 0; first < rows; first += together)
        sink(join.rows(first, std::min(together, rows - first)));
}

void join_slices(comm::Communicator& ranks, Executor& executor, const SlicedModel& model,
                 const model::Tensor& tensor, const Source& mine, const Sink& sink) {
    const Width width{sizeof(float)};
    join_arrays(ranks, executor, model, tensor, {&width, 1}, as_arrays(mine), of_arrays(sink));
}

}  // namespace ferry::train
