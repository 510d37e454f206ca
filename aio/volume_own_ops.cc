// The volume's own operations, for which it blocks: layout, flush, discard. They allocate nothing,
// but for the layout's buffer and the words of an error.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/log.h"
#include "buffer.h"
#include "errors.h"
#include "volume.h"

namespace ferry::aio {

VolumeOnPaths::OwnOp VolumeOnPaths::own_op_on(size_t path, int file, Verb verb) const {
    return {.path = path, .request = {.verb = verb, .file = static_cast<uint16_t>(file)}};
}

// A file's flushes are all on one ring, which remembers those that failed.
Queue& VolumeOnPaths::queue_of(const OwnOp& own_op) const noexcept {
    return queue_of(SlotPlace{.path = static_cast<uint16_t>(own_op.path),
                              .ring = static_cast<uint16_t>(own_op.request.file % options_.rings)});
}

// The first `count` of own_ops_. Blocks until all are done; throws the first error, after all have
// come back. The caller's operations finish first: an own_op may then count on what was written
// before it.
void VolumeOnPaths::run_own_ops(size_t count, const char* what) {
    wait_until_finished();
    const std::span<OwnOp> batch = std::span(own_ops_).first(count);
    for (OwnOp& own_op : batch) {
        own_op.request.operation = &own_op.operation;
        own_op.request.owner = Owner::volume;
        ++submitted_;
        queue_of(own_op).submit(own_op.request);
    }
    wait_until_finished();
    for (const OwnOp& own_op : batch)
        if (own_op.operation.state == State::failed) throw error_of(own_op, what);
}

// Everything that `next` puts into an own_op until it says that there is no more, in batches.
template <class Next>
void VolumeOnPaths::run_all(const char* what, const Next& next) {
    for (bool more = true; more;) {
        size_t count = 0;
        while (count < kOwnOpsMax && (more = next(own_ops_[count]))) ++count;
        if (count > 0) run_own_ops(count, what);
    }
}

Error VolumeOnPaths::error_of(const OwnOp& own_op, const char* what) const {
    const std::string file = file_name(static_cast<int>(own_op.path), own_op.request.file);
    return transfer_error(
        std::string(what) + " failed", file + " at " + std::to_string(own_op.request.file_offset),
        own_op.operation.error, own_op.operation.done_bytes, own_op.request.size_bytes);
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

VolumeOnPaths::OwnOp VolumeOnPaths::layout_write(size_t path, int file, int64_t file_offset,
                                                 std::span<std::byte> pattern) const {
    OwnOp own_op = own_op_on(path, file, Verb::write);
    own_op.operation.kind = Kind::write;
    own_op.operation.buffer = pattern;
    own_op.request.file_offset = file_offset;
    own_op.request.size_bytes = static_cast<int64_t>(pattern.size());
    return own_op;
}

void VolumeOnPaths::prepare_layout() {
    for (size_t p = 0; p < shapes_.size(); ++p) {
        written_.emplace_back();
        for (int f = 0; f < shapes_[p].files; ++f) {
            written_[p].emplace_back(static_cast<size_t>(file_end(p, f) / alignment_));
            const int64_t taken_over = files_.empty() ? 0 : files_[p]->written_end(f);
            note_written(p, static_cast<size_t>(f), 0,
                         std::max(shapes_[p].data_offset, taken_over));
        }
    }
}

// Whole blocks only: of one that was written in part the rest still wants its layout.
void VolumeOnPaths::note_written(size_t path, size_t file, int64_t begin, int64_t end) noexcept {
    if (written_.empty()) return;
    std::vector<bool>& blocks = written_[path][file];
    const auto block = [&](int64_t at) {
        return blocks.begin() + std::min(at / alignment_, std::ssize(blocks));
    };
    std::fill(block(begin), block(end), true);
}

void VolumeOnPaths::finish_layout() {
    if (written_.empty()) return;
    FERRY_CHECK(in_flight_ == 0 && phase_ == Phase::none,
                "the layout is finished while operations are under way");
    struct Front {
        size_t path;
        int file;
        std::ptrdiff_t block;
    };
    std::vector<Front> fronts;
    int64_t longest = alignment_;
    for (size_t p = 0; p < shapes_.size(); ++p) {
        for (int f = 0; f < shapes_[p].files; ++f) {
            fronts.push_back({p, f, 0});
            longest = std::max(longest, file_end(p, f));
        }
    }
    const int64_t most = std::min(kLayoutPart, longest);
    const AlignedBuffer buffer = layout_pattern(most);
    // Front to back in all files at once, so that every device writes all the time.
    size_t turn = 0;
    run_all("the layout's write", [&](OwnOp& own_op) {
        for (size_t tried = 0; tried < fronts.size(); ++tried) {
            Front& front = fronts[turn++ % fronts.size()];
            const auto& blocks = written_[front.path][static_cast<size_t>(front.file)];
            const auto begin = std::find(blocks.begin() + front.block, blocks.end(), false);
            const auto room = std::min<std::ptrdiff_t>(blocks.end() - begin, most / alignment_);
            const auto end = std::find(begin, begin + room, true);
            front.block = end - blocks.begin();
            if (begin == end) continue;
            own_op = layout_write(front.path, front.file, (begin - blocks.begin()) * alignment_,
                                  {buffer.get(), static_cast<size_t>((end - begin) * alignment_)});
            return true;
        }
        return false;
    });
    written_.clear();
    for (const auto& files : files_) files->mark_laid_out();
    refresh_speeds();
}

// ---------------------------------------------------------------- flush, discard

void VolumeOnPaths::flush() {
    size_t path = 0;
    int file = 0;
    run_all("flush", [&](OwnOp& own_op) {
        if (path == shapes_.size()) return false;
        own_op = own_op_on(path, file, Verb::flush);
        if (++file == shapes_[path].files) ++path, file = 0;
        return true;
    });
}

// The next run of free slots that lie side by side, from `slot` on.
bool VolumeOnPaths::next_discard(SlotId& slot, OwnOp& own_op) const noexcept {
    constexpr int64_t kMost = kGiB;  // so that none takes long
    int64_t bytes = 0;
    for (; slot < extents_->slots(); ++slot) {
        const SlotPlace& place = extents_->place(slot);
        const bool adjoins = bytes > 0 && place.path == own_op.path &&
                             place.file == own_op.request.file &&
                             place.offset == own_op.request.file_offset + bytes;
        const bool wanted = !extents_->used(slot) && discards_[place.path];
        if (bytes > 0 && (!wanted || !adjoins || bytes >= kMost)) break;
        if (!wanted) continue;
        if (bytes == 0) {
            own_op = own_op_on(place.path, place.file, Verb::discard);
            own_op.request.file_offset = place.offset;
        }
        bytes += slot_bytes(place.slot_class);
    }
    own_op.request.size_bytes = bytes;
    return bytes > 0;
}

void VolumeOnPaths::discard_free_slots() {
    own_ops_.assign(kOwnOpsMax, {});  // failures are looked for in all of them
    for (SlotId slot = 0; slot < extents_->slots();) {
        try {
            run_all("discard", [&](OwnOp& own_op) { return next_discard(slot, own_op); });
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
    for (const OwnOp& own_op : own_ops_) {
        const int error = own_op.operation.error;
        const bool unsupported = error == EOPNOTSUPP || error == EINVAL;
        if (unsupported) discards_[own_op.path] = false;
        only &= unsupported || error == 0;
    }
    return only;
}

}  // namespace ferry::aio
