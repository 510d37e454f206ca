// The volume's own operations, for which it blocks: layout, flush, discard.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "volume.h"

namespace ferry::aio {

// Preallocated blocks are marked unwritten, and the first write to each converts that mark: a
// metadata update, in the middle of a run, on every first use. So they are written here. The bytes
// are not zeros, which some devices merely note.
void VolumeOnPaths::write_every_slot() {
    constexpr int64_t kPart = 8 * kMiB;
    const AlignedBuffer buffer = aligned_buffer(alignment_, kPart);
    for (int64_t i = 0; i < kPart; ++i)
        buffer.get()[i] =
            static_cast<std::byte>(static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15u >> 56);
    std::vector<Errand> errands;
    for (size_t p = 0; p < shapes_.size(); ++p) {
        for (int f = 0; f < shapes_[p].segments; ++f) {
            const int64_t end = file_end(p, f);
            int64_t at = shapes_[p].data_offset;
            if (!files_.empty()) at = std::max(at, files_[p]->written_end(f));
            for (; at < end; at += kPart) {
                const int64_t bytes = std::min(kPart, end - at);
                Errand errand = errand_on(p, f, Verb::write);
                errand.operation.kind = Kind::write;
                errand.operation.buffer = {buffer.get(), static_cast<size_t>(bytes)};
                errand.request.file_offset = at;
                errand.request.size_bytes = bytes;
                errands.push_back(errand);
            }
        }
    }
    // Front to back on all paths at once, so that every device writes all the time.
    std::ranges::stable_sort(errands, {},
                             [](const Errand& errand) { return errand.request.file_offset; });
    run_errands(errands, "the layout's write");
    for (const auto& files : files_) files->mark_laid_out();
    refresh_speeds();
}

// Blocks until all are done; throws the first error, after all have come back. The caller's
// operations finish first: an errand may then count on what was written before it.
void VolumeOnPaths::run_errands(std::vector<Errand>& errands, const char* what) {
    wait_until_finished();
    for (Errand& errand : errands) {
        while (unfinished() >= kErrandsMax) executor_.wait(kForever);
        errand.request.operation = &errand.operation;
        errand.request.owner = Owner::errand;
        ++submitted_;
        errand.queue->submit(errand.request);
    }
    wait_until_finished();
    for (const Errand& errand : errands)
        if (errand.operation.state == State::failed) throw error_of(errand, what);
}

Error VolumeOnPaths::error_of(const Errand& errand, const char* what) {
    const int error = errand.operation.error;
    const std::string at = std::to_string(errand.request.file_offset);
    return {Trouble::io,
            {.what = std::string(what) + " failed: " + strerror(error),
             .where = errand.file + " at " + at,
             .measured = std::to_string(errand.operation.done_bytes) + " bytes moved",
             .limit = std::to_string(errand.request.size_bytes) + " bytes",
             .remedy = remedy_for(error)}};
}

int64_t VolumeOnPaths::unfinished() const noexcept {
    int64_t finished = 0;
    for (const auto& queue : queues_) finished += queue->finished();
    return submitted_ - finished;
}

void VolumeOnPaths::wait_until_finished() {
    while (unfinished() > 0) executor_.wait(kForever);
    // The waits above took the wake-ups that were meant for the caller's next one.
    if (in_flight_ > 0 || phase_ != Phase::none) executor_.wake();
}

void VolumeOnPaths::flush() {
    std::vector<Errand> errands;
    for (size_t p = 0; p < shapes_.size(); ++p)
        for (int f = 0; f < shapes_[p].segments; ++f)
            errands.push_back(errand_on(p, f, Verb::flush));
    run_errands(errands, "flush");
}

void VolumeOnPaths::discard_free_slots() {
    std::vector<Errand> errands;
    for (const SlotId slot : extents_->free_slots()) {
        const Place& place = extents_->place(slot);
        Errand errand = errand_on(place.path, place.file, Verb::discard);
        errand.request.file_offset = place.offset;
        errand.request.size_bytes = slot_bytes(place.slot_class);
        errands.push_back(errand);
    }
    try {
        run_errands(errands, "discard");
    } catch (const Error& error) {
        const bool unsupported = std::ranges::all_of(errands, [](const Errand& errand) {
            const int code = errand.operation.error;
            return code == 0 || code == EOPNOTSUPP || code == EINVAL;
        });
        if (!unsupported) throw;
        log_warn(std::string("aio: freed space cannot be discarded here: ") + error.what());
    }
}

VolumeOnPaths::Errand VolumeOnPaths::errand_on(size_t path, int file, Verb verb) const {
    const Place place{.path = static_cast<uint16_t>(path),
                      .ring = static_cast<uint16_t>(file % options_.rings),
                      .file = static_cast<uint16_t>(file)};
    return {.queue = &queue_of(place),
            .file = file_name(static_cast<int>(path), file),
            .request = {.verb = verb, .file = place.file}};
}

}  // namespace ferry::aio
