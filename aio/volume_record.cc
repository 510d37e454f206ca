// How a volume outlives its process: the slots, and two copies of a record of what they hold at the
// end of the first path's first file.
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/checksum.h"
#include "base/log.h"
#include "record.h"
#include "volume.h"

namespace ferry::aio {
namespace {

// Names a volume apart from every other: a path of another run proves nothing about this one.
uint64_t draw_volume_id() {
    uint64_t id = 0;
    errno = EIO;
    if (getrandom(&id, sizeof id, 0) == sizeof id) return id;
    throw Error(Trouble::io,
                problem_of("no random number can be drawn", "opening a volume", errno));
}

[[noreturn]] void refuse(std::string what, std::string where, std::string measured,
                         std::string limit, std::string remedy) {
    throw Error(Trouble::usage, {.what = "the run cannot be resumed: " + std::move(what),
                                 .where = std::move(where),
                                 .measured = std::move(measured),
                                 .limit = std::move(limit),
                                 .remedy = std::move(remedy)});
}

std::string slots_text(int64_t slots, int64_t slot_bytes) {
    return std::to_string(slots) + " slots of " + std::to_string(slot_bytes) + " bytes";
}

}  // namespace

int64_t VolumeOnPaths::copy_bytes() const noexcept {
    return options_.record_bytes > 0 ? round_up(kRecordOffset + options_.record_bytes, alignment_)
                                     : 0;
}

int64_t VolumeOnPaths::file_end(size_t path, int file) const noexcept {
    const int64_t slots_end = extents_->file_bytes(static_cast<int>(path), file);
    return path == 0 && file == 0 ? slots_end + 2 * copy_bytes() : slots_end;
}

// ---------------------------------------------------------------- where the slots lie

std::vector<Extents::PerPath> VolumeOnPaths::counts_to_resume() const {
    if (!resumes() || files_.empty()) return {};
    for (size_t p = 0; p < files_.size(); ++p) check_layout_to_resume(p);
    std::vector<Extents::PerPath> counts(options_.classes.size());
    for (size_t c = 0; c < counts.size(); ++c) {
        int64_t missing = options_.classes[c].slots;
        for (const auto& files : files_) {
            counts[c].push_back(files->found().layout[c].slots_here);
            missing -= counts[c].back();
        }
        if (missing > 0)
            refuse("its headers have fewer slots than its plan", options_.classes[c].name,
                   std::to_string(missing) + " slots are missing",
                   std::to_string(options_.classes[c].slots) + " slots",
                   "put the headers back as the run left them: the files beside them may be whole");
    }
    return counts;
}

void VolumeOnPaths::check_layout_to_resume(size_t path) const {
    const Header& found = files_[path]->found();
    const Header& first = files_[0]->found();
    const std::string& name = options_.paths[path].path;
    const auto paths = static_cast<int32_t>(files_.size());
    const auto place = static_cast<int32_t>(path);
    if (found.volume_id != first.volume_id)
        refuse("the paths are of different runs", name,
               options_.paths[0].path + " is of another one", "",
               "name the paths of one run, all of them, in their order");
    if (found.path != place || found.paths != paths)
        refuse(
            "the paths are not those of the run, in their order", name,
            "path " + std::to_string(place + 1) + " of " + std::to_string(paths),
            "it was path " + std::to_string(found.path + 1) + " of " + std::to_string(found.paths),
            "name the paths of the run, all of them, in their order");
    if (found.alignment != alignment_)
        refuse("the alignment of its paths has changed", name, std::to_string(alignment_),
               std::to_string(found.alignment),
               "mount the drive as it was, with the same use of O_DIRECT");
    if (options_.record_bytes == 0)
        refuse("its steps were durable, this one's are not", name,
               "checkpoint.durable_steps is false (VolumeOptions::record_bytes 0)",
               std::to_string(found.record_bytes) + " bytes",
               "set checkpoint.durable_steps to true, as in that run");
    const std::string same = "resume with the budgets and the chunk size of that run";
    if (found.record_bytes != options_.record_bytes ||
        found.classes != static_cast<int64_t>(options_.classes.size()))
        refuse("its state was laid out by another plan", name,
               std::to_string(options_.classes.size()) + " kinds of state, a record of " +
                   std::to_string(options_.record_bytes) + " bytes",
               std::to_string(found.classes) + " kinds of state, a record of " +
                   std::to_string(found.record_bytes) + " bytes",
               same);
    for (size_t c = 0; c < options_.classes.size(); ++c) {
        const auto& was = found.layout[c];
        const SlotClass& is = options_.classes[c];
        const int64_t slot_bytes = round_up(is.slot_bytes, alignment_);
        // With all the slack there can be, a path has no more than twice the slots of all.
        const bool sane = was.slots_here >= 0 && was.slots_here <= 2 * is.slots;
        if (sane && was.slot_bytes == slot_bytes && was.slots == is.slots) continue;
        refuse("its state was laid out by another plan", name + ", " + is.name,
               slots_text(is.slots, slot_bytes), slots_text(was.slots, was.slot_bytes), same);
    }
}

// Into every header, and as a key into every copy of the record.
void VolumeOnPaths::describe_layout() {
    if (options_.record_bytes == 0) return;
    std::vector<uint64_t> key;
    const uint64_t id = files_.empty() ? 0
                        : resumes()    ? files_[0]->found().volume_id
                                       : draw_volume_id();
    key.assign({id, static_cast<uint64_t>(alignment_), shapes_.size(), options_.classes.size()});
    for (size_t p = 0; p < shapes_.size(); ++p) {
        Header layout{.volume_id = id,
                      .path = static_cast<int32_t>(p),
                      .paths = static_cast<int32_t>(shapes_.size()),
                      .speed = shapes_[p].speed,
                      .alignment = alignment_,
                      .record_bytes = options_.record_bytes,
                      .classes = static_cast<int64_t>(options_.classes.size())};
        key.push_back(static_cast<uint64_t>(shapes_[p].files));
        for (size_t c = 0; c < options_.classes.size(); ++c) {
            const int number = static_cast<int>(c);
            layout.layout[c] = {.slot_bytes = slot_bytes(number),
                                .slots = options_.classes[c].slots,
                                .slots_here = extents_->count(number, static_cast<int>(p))};
            key.push_back(static_cast<uint64_t>(layout.layout[c].slot_bytes));
            key.push_back(static_cast<uint64_t>(layout.layout[c].slots_here));
        }
        if (!files_.empty() && !resumes()) files_[p]->describe_layout(layout);
    }
    record_key_ = checksum(std::as_bytes(std::span(key)));
}

void VolumeOnPaths::note_step(int64_t step) noexcept {
    for (const auto& files : files_) files->note_step(step);
}

// The first path is told first.
int64_t VolumeOnPaths::noted_step() const noexcept {
    return files_.empty() ? -1 : files_.front()->found().step;
}

void VolumeOnPaths::note_lost() noexcept {
    for (const auto& files : files_) files->note_lost();
}

// ---------------------------------------------------------------- publishing

VolumeOnPaths::OwnOp VolumeOnPaths::own_op_on_copy(int copy, Verb verb,
                                                   std::span<std::byte> buffer) const {
    OwnOp own_op = own_op_on(0, 0, verb);
    own_op.operation.kind = verb == Verb::read ? Kind::read : Kind::write;
    own_op.operation.buffer = buffer;
    own_op.request.file_offset = extents_->file_bytes(0, 0) + copy * copy_bytes();
    own_op.request.size_bytes = static_cast<int64_t>(buffer.size());
    return own_op;
}

void VolumeOnPaths::prepare_record() {
    if (options_.record_bytes == 0) return;
    record_ = aligned_buffer(alignment_, copy_bytes());
    memset(record_.get(), 0, static_cast<size_t>(copy_bytes()));
    for (size_t p = 0; p < shapes_.size(); ++p)
        for (int f = 0; f < shapes_[p].files; ++f) parts_.push_back(own_op_on(p, f, Verb::flush));
    parts_.push_back(own_op_on_copy(0, Verb::write, {}));
    kept_ = resumes();
}

std::span<std::byte> VolumeOnPaths::record() noexcept {
    FERRY_CHECK(phase_ == Phase::none, "a record is changed while it is published");
    return {record_.get() + kRecordOffset, static_cast<size_t>(options_.record_bytes)};
}

void VolumeOnPaths::publish(int64_t bytes) noexcept {
    FERRY_CHECK(phase_ == Phase::none && bytes <= options_.record_bytes);
    found_.clear();
    unreadable_.clear();
    const std::span<std::byte> copy(record_.get(), static_cast<size_t>(copy_bytes()));
    seal_record(copy, record_key_, {.sequence = sequence_ + 1, .bytes = bytes});
    OwnOp& write = parts_.back();
    const int64_t whole = round_up(kRecordOffset + bytes, alignment_);
    write.operation.buffer = copy.first(static_cast<size_t>(whole));
    write.request.file_offset = extents_->file_bytes(0, 0) + next_copy_ * copy_bytes();
    write.request.size_bytes = whole;
    part_failed_ = false;
    start(Phase::data);
}

void VolumeOnPaths::start(Phase phase) noexcept {
    phase_ = phase;
    switch (phase) {
        case Phase::data:
            for (size_t i = 0; i + 1 < parts_.size(); ++i) start_part(parts_[i]);
            return;
        case Phase::record:
            return start_part(parts_.back());
        case Phase::seal:
            return start_part(parts_.front());
        case Phase::none:
            ++sequence_;
            next_copy_ = 1 - next_copy_;
    }
}

void VolumeOnPaths::start_part(OwnOp& own_op) noexcept {
    own_op.operation.state = State::queued;
    own_op.operation.done_bytes = 0;
    own_op.operation.error = 0;
    own_op.request.operation = &own_op.operation;
    own_op.request.owner = Owner::publication;
    ++submitted_;
    ++parts_under_way_;
    queue_of(own_op).submit(own_op.request);
}

bool VolumeOnPaths::is_part(const Operation& operation) const noexcept {
    return std::ranges::any_of(
        parts_, [&](const OwnOp& own_op) { return &own_op.operation == &operation; });
}

void VolumeOnPaths::end_part(const Operation& operation) noexcept {
    part_failed_ |= operation.state == State::failed;
    if (const Request& write = parts_.back().request; phase_ == Phase::record && !part_failed_)
        note_written(0, 0, write.file_offset, write.file_offset + write.size_bytes);
    if (--parts_under_way_ > 0) return;
    if (part_failed_)
        phase_ = Phase::none;
    else
        start(phase_ == Phase::data     ? Phase::record
              : phase_ == Phase::record ? Phase::seal
                                        : Phase::none);
}

bool VolumeOnPaths::published() {
    if (phase_ != Phase::none) return false;
    for (const OwnOp& own_op : parts_)
        if (part_failed_ && own_op.operation.state == State::failed)
            throw error_of(own_op,
                           own_op.request.verb == Verb::flush ? "flush" : "the record's write");
    // Only now is there something to keep.
    if (!kept_) {
        for (const auto& files : files_) files->stage();
        // First where nothing is replaced: an ended run's files go once all of the new one is
        // there.
        for (const bool replaces : {false, true})
            for (const auto& files : files_)
                if (files->replaces() == replaces) files->keep();
    }
    kept_ = true;
    return true;
}

std::string VolumeOnPaths::missing() const {
    for (const auto& files : files_)
        if (std::string file = files->missing(); !file.empty()) return file;
    return {};
}

// ---------------------------------------------------------------- resuming

void VolumeOnPaths::find_records() {
    for (int copy = 0; copy < 2 && options_.record_bytes > 0; ++copy) {
        AlignedBuffer memory = aligned_buffer(alignment_, copy_bytes());
        const std::span<std::byte> bytes(memory.get(), static_cast<size_t>(copy_bytes()));
        own_ops_[0] = own_op_on_copy(copy, Verb::read, bytes);
        try {
            run_own_ops(1, "reading a record");
        } catch (const Error& error) {
            log_warn(std::string("aio: ") + error.what());
            unreadable_.push_back(error);
            continue;
        }
        if (const auto found = check_record(bytes, record_key_))
            found_.push_back({found->sequence, copy, found->bytes, std::move(memory)});
    }
    // Whoever asks for one that cannot be read hears why: perhaps it can be the next time.
    if (found_.empty() && !unreadable_.empty()) return;
    if (found_.empty())
        refuse("its volume is not consistent", options_.paths[0].path,
               "neither of the two records of its state is whole", "",
               "start without --resume, after removing what is there (leftovers \"remove_any\")");
    std::ranges::sort(found_, std::greater<>(), &Found::sequence);
    sequence_ = found_[0].sequence;
    resume_from(0);
}

std::span<const std::byte> VolumeOnPaths::found_record(size_t n) const {
    if (n >= found_.size()) {
        if (n - found_.size() < unreadable_.size()) throw Error(unreadable_[n - found_.size()]);
        return {};
    }
    return {found_[n].memory.get() + kRecordOffset, static_cast<size_t>(found_[n].bytes)};
}

void VolumeOnPaths::resume_from(size_t n) noexcept { next_copy_ = 1 - found_[n].copy; }

}  // namespace ferry::aio
