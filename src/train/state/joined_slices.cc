#include "joined_slices.h"

#include <algorithm>
#include <vector>

#include "comm/comm.h"
#include "ferry/units.h"

namespace ferry::train {
namespace {

constexpr int64_t kTogether = 4 * kMiB;  // elements of the whole tensor
constexpr int64_t kSent = comm::Communicator::kAgreedBytes / int64_t{sizeof(float)};

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

// Puts a slice's values of some rows, part behind part, to their places among the whole tensor's.
void place(const model::Tensor& slice, const std::vector<model::SliceRun>& parts,
           std::span<const float> values, int64_t first_of_whole, std::span<float> whole) {
    for (const model::SliceRun& part : parts) {
        for (const model::SliceRun& run : model::runs_of(slice, part.at, part.count))
            std::ranges::copy(values.subspan(static_cast<size_t>(run.at - part.at),
                                             static_cast<size_t>(run.count)),
                              whole.begin() + (run.from - first_of_whole));
        values = values.subspan(static_cast<size_t>(part.count));
    }
}

class Join {
public:
    Join(comm::Communicator& ranks, Executor& executor, const SlicedModel& model,
         const model::Tensor& tensor, const Source& mine)
        : ranks_(ranks),
          executor_(executor),
          own_(model.slicing.rank),
          first_rank_(ranks.rank() - own_),
          tensor_(tensor),
          mine_(mine),
          all_(static_cast<size_t>(ranks.size() * kSent)) {
        for (int rank = 0; rank < model.slicing.ranks; ++rank)
            slices_.push_back(model::slice_of(model.whole, tensor, {model.slicing.ranks, rank}));
    }

    // Rows of the whole tensor.
    std::span<const float> rows(int64_t first, int64_t count) {
        const int64_t row = tensor_.whole.size() > 1 ? tensor_.whole[1] : 1;
        std::vector<std::vector<model::SliceRun>> parts;
        int64_t most = 0;
        for (const model::Tensor& slice : slices_) {
            parts.push_back(parts_of(slice, first, count));
            most = std::max(most, elements_of(parts.back()));
        }
        read(parts[static_cast<size_t>(own_)], most);
        std::vector<std::vector<float>> values = exchange(most);
        whole_.assign(static_cast<size_t>(count * row), 0.0f);
        for (size_t rank = 0; rank < slices_.size(); ++rank)
            place(slices_[rank], parts[rank], values[rank], first * row, whole_);
        return whole_;
    }

private:
    void read(const std::vector<model::SliceRun>& parts, int64_t most) {
        sent_.clear();
        for (const model::SliceRun& part : parts) {
            mine_({tensor_.offset + part.at, part.count}, [this](std::span<const float> values) {
                sent_.insert(sent_.end(), values.begin(), values.end());
            });
        }
        sent_.resize(static_cast<size_t>(most));
    }

    // Of every slice, as this rank's neighbours have it.
    std::vector<std::vector<float>> exchange(int64_t count) {
        std::vector<std::vector<float>> values(slices_.size());
        for (int64_t at = 0; at < count; at += kSent) {
            const auto here = static_cast<size_t>(std::min(kSent, count - at));
            const auto all = std::span(all_).first(here * static_cast<size_t>(ranks_.size()));
            comm::agree(ranks_, executor_,
                        std::as_bytes(std::span(sent_).subspan(static_cast<size_t>(at), here)),
                        std::as_writable_bytes(all), {.of = "slices of a tensor"});
            for (size_t rank = 0; rank < values.size(); ++rank) {
                const auto its =
                    all.subspan((static_cast<size_t>(first_rank_) + rank) * here, here);
                values[rank].insert(values[rank].end(), its.begin(), its.end());
            }
        }
        return values;
    }

    comm::Communicator& ranks_;
    Executor& executor_;
    const int own_, first_rank_;
    const model::Tensor& tensor_;
    const Source& mine_;
    std::vector<model::Tensor> slices_{};
    std::vector<float> sent_{}, all_{}, whole_{};
};

}  // namespace

void join_slices(comm::Communicator& ranks, Executor& executor, const SlicedModel& model,
                 const model::Tensor& tensor, const Source& mine, const Sink& sink) {
    const int64_t row = tensor.whole.size() > 1 ? tensor.whole[1] : 1;
    const int64_t rows = tensor.whole[0], together = std::max<int64_t>(1, kTogether / row);
    Join join(ranks, executor, model, tensor, mine);
    for (int64_t first = 0; first < rows; first += together)
        sink(join.rows(first, std::min(together, rows - first)));
}

}  // namespace ferry::train
