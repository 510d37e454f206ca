#include "tensors_ahead.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>

#include "base/checksum.h"
#include "ferry/error.h"
#include "stripe_sums.h"

namespace ferry::checkpoint {
namespace {

// Transfers of 1 MiB. Nothing else runs while state is read: the drive may have many.
constexpr int kInFlight = 64, kOperations = 256, kFilesMost = 4096;

}  // namespace

TensorsAhead::TensorsAhead(Team& team, int64_t memory)
    : team_(team),
      memory_(round_up(memory, kBlock)),
      kept_(round_down(memory / 4, kBlock)),
      executor_(make_thread_executor()),
      operations_(kOperations),
      steps_(1) {
    files_ = aio::UserFiles::open(
        {.queue_depth = kInFlight, .operations_max = kOperations, .files_max = kFilesMost},
        *executor_);
    for (size_t i = operations_.size(); i-- > 0;) free_operations_.push_back(i);
}

TensorsAhead::~TensorsAhead() = default;

int64_t TensorsAhead::begin_in_file(const Stripe& stripe) {
    return round_down(stripe.stored->offset + stripe.first, kBlock);
}

int64_t TensorsAhead::room_of(const Stripe& stripe) {
    const int64_t end = stripe.stored->offset + stripe.first + stripe.bytes;
    return round_up(end, kBlock) - begin_in_file(stripe);
}

const std::byte* TensorsAhead::bytes_of(const Stripe& stripe) const {
    const auto at = static_cast<size_t>(stripe.at % std::ssize(ring_->bytes()));
    return ring_->bytes().data() + at + stripe.stored->offset + stripe.first -
           begin_in_file(stripe);
}

void TensorsAhead::require_sums(const TensorSource& tensor) {
    const int64_t wanted = ceil_div(tensor.bytes, kStripeBytes), there = std::ssize(tensor.stripes);
    if (there == 0 || there == wanted) return;
    throw Error(Trouble::io,
                {.what = "a tensor has another size than the manifest says",
                 .where = tensor.weights->file_of(*tensor.stored) + ": " + tensor.stored->name,
                 .measured = fmt::format("{} bytes, {} stripes", tensor.bytes, wanted),
                 .limit = fmt::format("checksums of {} stripes", there),
                 .remedy = "use another checkpoint: ferry ckpt verify says which are whole"});
}

void TensorsAhead::want(const TensorSource& tensor, int64_t first, int64_t bytes) {
    FERRY_CHECK(!started_ && first >= 0 && first + bytes <= tensor.bytes, tensor.stored->name);
    require_sums(tensor);
    const int descriptor = tensor.weights->descriptor_of(*tensor.stored);
    auto number = numbers_.find(descriptor);
    if (number == numbers_.end())
        number = numbers_.emplace(descriptor, files_->add(descriptor)).first;
    for (int64_t at = round_down(first, kStripeBytes); at < first + bytes; at += kStripeBytes) {
        const auto [found, is_new] =
            found_.try_emplace(std::pair(tensor.stored, at), stripes_.size());
        const int64_t end = ends_.empty() ? 0 : ends_.back();
        if (!is_new && end - ends_[found->second] <= kept_) {
            Stripe& known = stripes_[found->second];
            if (known.last_step != steps_.size() - 1) steps_.back().push_back(found->second);
            known.last_step = steps_.size() - 1;
            continue;
        }
        found->second = stripes_.size();
        const auto index = static_cast<size_t>(at / kStripeBytes);
        stripes_.push_back({.stored = tensor.stored,
                            .weights = tensor.weights,
                            .file = number->second,
                            .first = at,
                            .bytes = std::min(kStripeBytes, tensor.bytes - at),
                            .sum = tensor.stripes.empty() ? nullptr : &tensor.stripes[index],
                            .last_step = steps_.size() - 1});
        step_room_ += room_of(stripes_.back());
        ends_.push_back(end + room_of(stripes_.back()));
        steps_.back().push_back(stripes_.size() - 1);
    }
}

void TensorsAhead::end_step() {
    largest_step_ = std::max(largest_step_, std::exchange(step_room_, 0));
    steps_.emplace_back();
}

void TensorsAhead::begin() {
    started_ = true;
    found_.clear();
    // Room for the largest step with what is kept before it, wherever the ring's end lies.
    const int64_t least = largest_step_ + kept_ + 2 * (kStripeBytes + 2 * kBlock);
    const int64_t all = ends_.empty() ? kBlock : ends_.back();
    ring_ = std::make_unique<IoMemory>(std::max(std::min(all, memory_), std::min(all, least)) +
                                       kStripeBytes + 2 * kBlock);
}

void TensorsAhead::read_more() {
    const int64_t size = std::ssize(ring_->bytes());
    while (begun_ < stripes_.size() && !free_operations_.empty()) {
        Stripe& stripe = stripes_[begun_];
        const int64_t room = room_of(stripe), at = tail_ % size;
        const int64_t first = at + room > size ? tail_ + size - at : tail_;  // never around the end
        if (first + room - head_ > size) return;
        stripe.at = first;
        tail_ = first + room;
        const size_t slot = free_operations_.back();
        free_operations_.pop_back();
        const int64_t begin = begin_in_file(stripe),
                      end = stripe.stored->offset + stripe.first + stripe.bytes,
                      whole = std::min(begin + room, files_->size_bytes(stripe.file));
        if (whole < end) stripe.weights->check_unchanged(*stripe.stored);  // it was cut: throws
        operations_[slot] = {.kind = aio::Kind::read,
                             .slot = stripe.file,
                             .offset = begin,
                             .buffer = ring_->bytes().subspan(static_cast<size_t>(first % size),
                                                              static_cast<size_t>(whole - begin)),
                             .tag = begun_};
        FERRY_CHECK(files_->try_submit(operations_[slot]), "more transfers than operations");
        ++begun_;
    }
}

void TensorsAhead::land_one() {
    aio::Operation* ended = files_->poll();
    while (ended == nullptr) {
        executor_->wait(kForever);
        ended = files_->poll();
    }
    Stripe& stripe = stripes_[ended->tag];
    if (ended->state != aio::State::done) {
        Problem problem = aio::to_error(*files_, *ended).problem();
        problem.what = "the weights cannot be read";
        problem.where = stripe.weights->file_of(*stripe.stored) + ": " + stripe.stored->name;
        throw Error(Trouble::io, std::move(problem));
    }
    stripe.landed = true;
    free_operations_.push_back(static_cast<size_t>(ended - operations_.data()));
}

// The stripes that no step from step_ on wants, from the oldest to the first that one does.
void TensorsAhead::release() {
    while (released_ < begun_ && stripes_[released_].last_step < step_) ++released_;
    head_ = released_ < begun_ ? stripes_[released_].at : tail_;
}

void TensorsAhead::next() {
    if (!started_) begin();
    FERRY_CHECK(step_ < steps_.size(), "a step more than was wanted");
    release();
    const std::vector<size_t>& wanted = steps_[step_];
    for (;;) {
        read_more();
        const bool there =
            std::ranges::all_of(wanted, [&](size_t stripe) { return stripes_[stripe].landed; });
        if (there) break;
        FERRY_CHECK(files_->in_flight() > 0, "a step that has no room");
        land_one();
    }
    prove(wanted);
    ++step_;
}

void TensorsAhead::prove(std::span<const size_t> stripes) {
    std::mutex mutex;
    size_t worst = stripes_.size();
    uint64_t sum = 0;
    team_.parallel(std::ssize(stripes), [&](int64_t i) {
        const size_t index = stripes[static_cast<size_t>(i)];
        Stripe& stripe = stripes_[index];
        if (stripe.proved || stripe.sum == nullptr) return;
        const uint64_t found = checksum({bytes_of(stripe), static_cast<size_t>(stripe.bytes)});
        stripe.proved = found == *stripe.sum;
        if (stripe.proved) return;
        const std::lock_guard lock(mutex);
        if (index > worst) return;
        worst = index;
        sum = found;
    });
    if (worst < stripes_.size()) {
        const Stripe& stripe = stripes_[worst];
        throw Error(Trouble::io,
                    {.what = "bytes of the checkpoint are not those that were written",
                     .where = stripe.weights->file_of(*stripe.stored) + ": " + stripe.stored->name,
                     .measured = fmt::format("checksum {:016x} of {} bytes from {} on", sum,
                                             stripe.bytes, stripe.first),
                     .limit = fmt::format("{:016x}", *stripe.sum),
                     .remedy = "use another checkpoint: ferry ckpt verify says which are whole"});
    }
    // Where nothing is proved by a checksum, nobody may have written meanwhile.
    const StoredTensor* last = nullptr;
    for (const size_t index : stripes) {
        if (stripes_[index].stored == last) continue;
        last = stripes_[index].stored;
        stripes_[index].weights->check_unchanged(*last);
    }
}

void TensorsAhead::read(const StoredTensor& tensor, int64_t first, std::span<std::byte> out) const {
    FERRY_CHECK(step_ > 0, tensor.name);
    const std::vector<size_t>& wanted = steps_[step_ - 1];
    while (!out.empty()) {
        const auto found = std::ranges::find_if(wanted, [&](size_t index) {
            const Stripe& stripe = stripes_[index];
            return stripe.stored == &tensor && first >= stripe.first &&
                   first < stripe.first + stripe.bytes;
        });
        FERRY_CHECK(found != wanted.end(), tensor.name);
        const Stripe& stripe = stripes_[*found];
        const auto part =
            static_cast<size_t>(std::min(std::ssize(out), stripe.first + stripe.bytes - first));
        std::memcpy(out.data(), bytes_of(stripe) + (first - stripe.first), part);
        out = out.subspan(part);
        first += static_cast<int64_t>(part);
    }
}

void TensorsAhead::read_floats(const StoredTensor& tensor, int64_t first,
                               std::span<float> out) const {
    FERRY_CHECK(tensor.type.has_value(), tensor.name);
    const int64_t count = std::ssize(out), width = size_of(*tensor.type);
    std::byte* const narrow =
        reinterpret_cast<std::byte*>(out.data()) + count * (int64_t{sizeof(float)} - width);
    read(tensor, first * width, {narrow, static_cast<size_t>(count * width)});
    widen_in_place(*tensor.type, out);
}

void TensorsAhead::read_as(const StoredTensor& tensor, int64_t first, DType type,
                           std::span<std::byte> out) const {
    const int64_t width = size_of(type);
    if (tensor.type == type) return read(tensor, first * width, out);
    constexpr int64_t kPart = 4096;
    std::array<float, kPart> values{};
    for (int64_t at = 0, count = std::ssize(out) / width; at < count; at += kPart) {
        const auto part = std::span(values).first(static_cast<size_t>(std::min(kPart, count - at)));
        read_floats(tensor, first + at, part);
        convert(part, type, tensor.name, out.data() + at * width);
    }
}

}  // namespace ferry::checkpoint
