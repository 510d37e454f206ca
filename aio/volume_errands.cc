// The volume's own operations, for which it blocks: layout, flush, discard. They allocate nothing,
// but for the layout's buffer and the words of an error.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "buffer.h"
#include "errors.h"
#include "volume.h"

namespace ferry::aio {

VolumeOnPaths::Errand VolumeOnPaths::errand_on(size_t path, int file, Verb verb) const {
    return {.path = path, .request = {.verb = verb, .file = static_cast<uint16_t>(file)}};
}

// A file's flushes are all on one ring, which remembers those that failed.
Queue& VolumeOnPaths::queue_of(const Errand& errand) const noexcept {
    return queue_of(Place{.path = static_cast<uint16_t>(errand.path),
                          .ring = static_cast<uint16_t>(errand.request.file % options_.rings)});
}

// The first `count` of errands_. Blocks until all are done; throws the first error, after all have
// come back. The caller's operations finish first: an errand may then count on what was written
// before it.
void VolumeOnPaths::run_errands(size_t count, const char* what) {
    wait_until_finished();
    const std::span<Errand> batch = std::span(errands_).first(count);
    for (Errand& errand : batch) {
        errand.request.operation = &errand.operation;
        errand.request.owner = Owner::errand;
        ++submitted_;
        queue_of(errand).submit(errand.request);
    }
    wait_until_finished();
    for (const Errand& errand : batch)
        if (errand.operation.state == State::failed) throw error_of(errand, what);
}

// Everything that `next` puts into an errand until it says that there is no more, in batches.
template <class Next>
void VolumeOnPaths::run_all(const char* what, const Next& next) {
    for (bool more = true; more;) {
        size_t count = 0;
        while (count < kErrandsMax && (more = next(errands_[count]))) ++count;
        if (count > 0) run_errands(count, what);
    }
}

Error VolumeOnPaths::error_of(const Errand& errand, const char* what) const {
    const int error = errand.operation.error;
    const std::string file = file_name(static_cast<int>(errand.path), errand.request.file);
    return {Trouble::io,
            {.what = std::string(what) + " failed: " + strerror(error),
             .where = file + " at " + std::to_string(errand.request.file_offset),
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

// ---------------------------------------------------------------- layout

// Preallocated blocks are marked unwritten, and the first write to each converts that mark: a
// metadata update, in the middle of a run, on every first use. So they are written here.

constexpr int64_t kLayoutPart = 8 * kMiB;

// No zeros, which some devices merely note.
AlignedBuffer VolumeOnPaths::layout_pattern(int64_t bytes) const {
    AlignedBuffer buffer = aligned_buffer(alignment_, bytes);
    for (int64_t i = 0; i < bytes; ++i)
        buffer.get()[i] =
            static_cast<std::byte>(static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15u >> 56);
    return buffer;
}

VolumeOnPaths::Errand VolumeOnPaths::layout_write(size_t path, int file, int64_t file_offset,
                                                  std::span<std::byte> pattern) const {
    Errand errand = errand_on(path, file, Verb::write);
    errand.operation.kind = Kind::write;
    errand.operation.buffer = pattern;
    errand.request.file_offset = file_offset;
    errand.request.size_bytes = static_cast<int64_t>(pattern.size());
    return errand;
}

void VolumeOnPaths::end_layout() {
    for (const auto& files : files_) files->mark_laid_out();
    refresh_speeds();
}

void VolumeOnPaths::finish_layout() {
    if (written_.empty()) return;
    const AlignedBuffer buffer = layout_pattern(kLayoutPart);
    SlotId slot = 0;
    int64_t done = 0;  // bytes of it
    run_all("the layout's write", [&](Errand& errand) {
        for (; slot < extents_->slots(); ++slot, done = 0) {
            const Place& place = extents_->place(slot);
            const int64_t at = place.offset + done;
            const int64_t part = std::min(kLayoutPart, slot_bytes(place.slot_class) - done);
            const bool before = !files_.empty() && files_[place.path]->written_end(place.file) >=
                                                       place.offset + slot_bytes(place.slot_class);
            if (written_[slot] || before || part == 0) continue;
            errand =
                layout_write(place.path, place.file, at, {buffer.get(), static_cast<size_t>(part)});
            done += part;
            return true;
        }
        return false;
    });
    written_.clear();
    end_layout();
}

void VolumeOnPaths::write_every_slot() {
    int64_t longest = 0;
    for (size_t p = 0; p < shapes_.size(); ++p)
        for (int f = 0; f < shapes_[p].segments; ++f) longest = std::max(longest, file_end(p, f));
    const int64_t part = std::min(kLayoutPart, std::max(longest, alignment_));
    const AlignedBuffer buffer = layout_pattern(part);
    // Front to back on all paths at once, so that every device writes all the time.
    int64_t front = 0;
    size_t path = 0;
    int file = -1;
    const auto next_file = [&] {
        if (++file < shapes_[path].segments) return true;
        file = 0;
        if (++path < shapes_.size()) return true;
        path = 0;
        return (front += part) < longest;
    };
    run_all("the layout's write", [&](Errand& errand) {
        while (next_file()) {
            const int64_t begin = shapes_[path].data_offset;
            const int64_t written = files_.empty() ? 0 : files_[path]->written_end(file);
            const int64_t at = std::max(front, std::max(begin, written));
            const int64_t end = std::min(front + part, file_end(path, file));
            if (at >= end) continue;
            errand = layout_write(path, file, at, {buffer.get(), static_cast<size_t>(end - at)});
            return true;
        }
        return false;
    });
    end_layout();
}

// ---------------------------------------------------------------- flush, discard

void VolumeOnPaths::flush() {
    size_t path = 0;
    int file = 0;
    run_all("flush", [&](Errand& errand) {
        if (path == shapes_.size()) return false;
        errand = errand_on(path, file, Verb::flush);
        if (++file == shapes_[path].segments) ++path, file = 0;
        return true;
    });
}

// The next run of free slots that lie side by side, from `slot` on.
bool VolumeOnPaths::next_discard(SlotId& slot, Errand& errand) const noexcept {
    constexpr int64_t kMost = kGiB;  // so that none takes long
    int64_t bytes = 0;
    for (; slot < extents_->slots(); ++slot) {
        const Place& place = extents_->place(slot);
        const bool adjoins = bytes > 0 && place.path == errand.path &&
                             place.file == errand.request.file &&
                             place.offset == errand.request.file_offset + bytes;
        const bool wanted = !extents_->used(slot) && discards_[place.path];
        if (bytes > 0 && (!wanted || !adjoins || bytes >= kMost)) break;
        if (!wanted) continue;
        if (bytes == 0) {
            errand = errand_on(place.path, place.file, Verb::discard);
            errand.request.file_offset = place.offset;
        }
        bytes += slot_bytes(place.slot_class);
    }
    errand.request.size_bytes = bytes;
    return bytes > 0;
}

void VolumeOnPaths::discard_free_slots() {
    errands_.assign(kErrandsMax, {});  // what failed is looked for in all of them
    for (SlotId slot = 0; slot < extents_->slots();) {
        try {
            run_all("discard", [&](Errand& errand) { return next_discard(slot, errand); });
        } catch (const Error& error) {
            if (!only_unsupported()) throw;
            log_warn(std::string("aio: freed space cannot be discarded here: ") + error.what());
        }
    }
}

// After a batch of discards failed: whether only because there is no such thing on some paths,
// which are not asked again.
bool VolumeOnPaths::only_unsupported() noexcept {
    bool only = true;
    for (const Errand& errand : errands_) {
        const int error = errand.operation.error;
        const bool unsupported = error == EOPNOTSUPP || error == EINVAL;
        if (unsupported) discards_[errand.path] = false;
        only &= unsupported || error == 0;
    }
    return only;
}

}  // namespace ferry::aio
