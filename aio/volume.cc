#include "volume.h"

#include <linux/io_uring.h>
#include <sched.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <new>
#include <system_error>

#include "base/log.h"
#include "base/process_limits.h"
#include "base/text.h"

namespace ferry::aio {
namespace {

constexpr int64_t kBlockMax = kGiB;  // a transfer's result must fit the kernel's int

[[noreturn]] void bad_option(std::string what, std::string measured, std::string limit,
                             std::string remedy) {
    throw Error(Trouble::usage, {.what = std::move(what),
                                 .where = "volume options",
                                 .measured = std::move(measured),
                                 .limit = std::move(limit),
                                 .remedy = std::move(remedy)});
}

[[noreturn]] void out_of_range(const std::string& name, const std::string& value,
                               const std::string& range) {
    bad_option(name + " is out of range", value, range, "set " + name + " within " + range);
}

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
        out_of_range(name, std::to_string(value),
                     std::to_string(low) + " to " + std::to_string(high));
}

// Kernel threads of a ring, where copying is all there is to do: all rings share half the cores, as
// whoever waits for the bytes needs some too. With one each the kernel's own way is as good, and
// cheaper.
int workers_for_each(int rings) {
    constexpr int kMost = 16;
    cpu_set_t cores;
    const int count = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    return std::clamp(count / (2 * rings), 1, kMost);
}

}  // namespace

std::unique_ptr<Volume> Volume::open(VolumeOptions options, Executor& executor) {
    return open_volume(std::move(options), executor);
}

std::unique_ptr<Volume> open_volume(VolumeOptions options, Executor& executor,
                                    const BackendFactory& make_backend) try {
    return std::make_unique<VolumeOnPaths>(std::move(options), executor, make_backend);
} catch (const std::bad_alloc&) {
    throw Error(Trouble::does_not_fit, problem_of("no memory", "opening a volume", ENOMEM));
} catch (const std::system_error& error) {
    refuse_thread("opening a volume, a thread for I/O", error.what());
}

// ---------------------------------------------------------------- opening

VolumeOnPaths::VolumeOnPaths(VolumeOptions options, Executor& executor,
                             const BackendFactory& make_backend)
    : options_(std::move(options)),
      executor_(executor),
      own_ops_(kOwnOpsMax),
      discards_(options_.paths.size(), true) {
    check_options();
    const bool on_files = !make_backend;
    if (on_files) check_paths_differ();
    const BackendFactory chosen = on_files ? factory_of(options_.backend) : make_backend;
    shapes_ = open_paths(on_files);
    extents_ = std::make_unique<Extents>(options_.classes, shapes_, alignment_, options_.slack,
                                         counts_to_resume());
    describe_layout();
    for (size_t p = 0; p < files_.size(); ++p)
        for (int i = 0; i < shapes_[p].files; ++i) files_[p]->create_slot_file(i, file_end(p, i));
    try {
        start_rings(chosen);
        prepare_record();
        if (resumes())
            find_records();
        else if (options_.write_once)
            prepare_layout();
        for (const auto& files : files_) files->drop_staged();
        for (const auto& files : files_) files->check_room();
        for (const auto& files : files_) files->make_room();
        if (!options_.write_once && options_.record_bytes == 0)
            for (const auto& files : files_) files->take_place();  // nothing comes that would
        if (!options_.lays_out_later) VolumeOnPaths::finish_layout();
    } catch (...) {
        retire_queues();
        throw;
    }
}

VolumeOnPaths::~VolumeOnPaths() {
    cancel_queued();
    wait_until_finished();
    retire_queues();
}

void VolumeOnPaths::retire_queues() noexcept {
    for (; hosted_ > 0; --hosted_) executor_.retire(*queues_[hosted_ - 1]);
}

void VolumeOnPaths::check_options() const {
    if (options_.paths.empty())
        bad_option("no storage path is given", "0 paths", "at least 1", "name a directory to use");
    check_range("paths", static_cast<int64_t>(options_.paths.size()), 1, 1024);
    check_range("classes", static_cast<int64_t>(options_.classes.size()), 1, 65535);
    check_range("queue_depth", options_.queue_depth, 1, 4096);
    check_range("operations_max", options_.operations_max, 1, 1 << 20);
    check_range("rings", options_.rings, 1, 64);
    check_range("block_bytes", options_.block_bytes, 4096, kBlockMax);
    if (!(options_.slack >= 0 && options_.slack <= 1))
        out_of_range("slack", std::to_string(options_.slack), "0 to 1");
    for (const PathOptions& path : options_.paths) {
        check_range("files", path.files, 0, kFilesMax);
        check_range("size_bytes", path.size_bytes, 0, int64_t{1} << 60);
    }
    for (const SlotClass& one : options_.classes) {
        check_range("slot_bytes", one.slot_bytes, 1, int64_t{1} << 50);
        check_range("slots", one.slots, 0, int64_t{1} << 31);
    }
    check_range("record_bytes", options_.record_bytes, 0, int64_t{1} << 40);
    if (options_.record_bytes > 0)
        check_range("classes", static_cast<int64_t>(options_.classes.size()), 1, kRecordClassesMax);
}

// One directory under two names, or one device under two, would be locked against itself.
void VolumeOnPaths::check_paths_differ() const {
    std::map<std::array<uint64_t, 3>, std::string> seen;
    for (const PathOptions& path : options_.paths) {
        struct stat status {};
        if (stat(path.path.c_str(), &status) != 0) continue;  // refused where it is opened
        std::array<uint64_t, 3> id{0, status.st_dev, status.st_ino};
        if (S_ISBLK(status.st_mode)) id = {1, status.st_rdev, 0};
        const auto [other, fresh] = seen.emplace(id, path.path);
        if (!fresh)
            throw Error(Trouble::usage, {.what = "the same storage path is given twice",
                                         .where = path.path,
                                         .measured = other->second + " is the same",
                                         .remedy = "name each path once"});
    }
}

std::vector<PathShape> VolumeOnPaths::open_paths(bool on_files) {
    std::vector<PathShape> shapes;
    bool weigh = false, given = false;
    for (const PathOptions& path : options_.paths) {
        PathShape shape{.name = path.path,
                        .files = std::max(1, path.files),
                        .rings = options_.rings,
                        .data_offset = 0,
                        .capacity_bytes = path.size_bytes ? path.size_bytes : int64_t{1} << 60,
                        .speed = path.bytes_per_s > 0 ? path.bytes_per_s : 1};
        weigh |= path.bytes_per_s <= 0 && options_.paths.size() > 1;
        given |= path.bytes_per_s > 0;
        if (on_files) {
            files_.push_back(std::make_unique<PathFiles>(path, options_));
            const PathFiles& files = *files_.back();
            shape.files = files.file_count();
            shape.data_offset = files.data_offset();
            shape.capacity_bytes = files.capacity_bytes();
            alignment_ = std::max(alignment_, files.alignment());
            if (files.resumed()) shape.speed = files.found().speed;
        }
        shapes.push_back(shape);
    }
    // A given speed and a measured one do not compare: measure all or none. Measuring writes.
    if (weigh && given)
        log_warn("aio: bytes_per_s is given for some of the paths only: all are measured");
    for (size_t p = 0; weigh && !resumes() && p < shapes.size(); ++p)
        shapes[p].speed = on_files ? files_[p]->measure_speed() : 1;
    if (options_.block_bytes % alignment_ != 0)
        bad_option("block_bytes is not a multiple of the alignment",
                   std::to_string(options_.block_bytes), std::to_string(alignment_),
                   "set block_bytes to a multiple of " + std::to_string(alignment_));
    shapes[0].capacity_bytes -= 2 * copy_bytes();
    return shapes;
}

BackendSetup VolumeOnPaths::setup_of(size_t path) const {
    BackendSetup setup{.path = static_cast<int>(path),
                       .depth = options_.queue_depth,
                       .registered = options_.registered};
    if (files_.empty()) return setup;
    setup.files = files_[path]->descriptors();
    setup.block_device = options_.paths[path].raw_device;
    if (files_[path]->only_copies()) setup.workers = workers_for_each(rings_that_copy());
    const auto probe = [&](bool wanted, const char* option, unsigned flags) {
        if (!wanted || options_.backend == BackendKind::posix) return false;
        if (resumes()) {
            log_warn("aio: " + std::string(option) + " is not used on " +
                     options_.paths[path].path + ": trying it out would overwrite what is resumed");
            return false;
        }
        const std::string why = files_[path]->why_no_polling(flags);
        if (!why.empty())
            log_warn("aio: " + std::string(option) + " does not work on " +
                     options_.paths[path].path + " (" + why + "): it is not used");
        return why.empty();
    };
    setup.iopoll = probe(options_.iopoll, "iopoll", IORING_SETUP_IOPOLL);
    const unsigned also = setup.iopoll ? unsigned{IORING_SETUP_IOPOLL} : 0;
    setup.sqpoll = probe(options_.sqpoll, "sqpoll", IORING_SETUP_SQPOLL | also);
    return setup;
}

int VolumeOnPaths::rings_that_copy() const {
    return options_.rings * static_cast<int>(std::ranges::count_if(
                                files_, [](const auto& files) { return files->only_copies(); }));
}

void VolumeOnPaths::start_rings(const BackendFactory& make_backend) {
    for (size_t p = 0; p < options_.paths.size(); ++p) {
        BackendSetup setup = setup_of(p);
        for (int r = 0; r < options_.rings; ++r) {
            const std::string name = "aio-" + std::to_string(p) + "-" + std::to_string(r);
            setup.ring = r;
            queues_.push_back(std::make_unique<Queue>(
                QueueOptions{.name = name,
                             .path = setup.path,
                             .ring = r,
                             .depth = options_.queue_depth,
                             .operations_max =
                                 options_.operations_max + int{kOwnOpsMax} + shapes_[p].files + 1,
                             .block_bytes = options_.block_bytes,
                             // A file takes one worker's write at a time: of an operation's blocks
                             // all others would wait for it.
                             .whole_writes = setup.workers > 1,
                             .alignment = alignment_,
                             .slots = extents_->slots(),
                             .files = shapes_[p].files,
                             .cores = options_.paths[p].cores,
                             .tracer = options_.tracer},
                make_backend(setup), executor_));
        }
    }
    for (const auto& queue : queues_)
        if (const std::string name(queue->backend_name()); name != backend_name_)
            backend_name_ += (backend_name_.empty() ? "" : " and ") + name;
    if (!files_.empty())
        log_info("aio: " + backend_name_ + ", " + std::to_string(queues_.size()) +
                 " ring(s) of depth " + std::to_string(options_.queue_depth) + ", blocks of " +
                 format_bytes(options_.block_bytes) + ", alignment " + std::to_string(alignment_));
    for (const auto& queue : queues_) {
        executor_.host(*queue);
        ++hosted_;
    }
}

// ---------------------------------------------------------------- the caller's operations

SlotId VolumeOnPaths::allocate(int slot_class) noexcept {
    constexpr uint32_t kRefreshEvery = 64;
    if (++allocations_ % kRefreshEvery == 0) refresh_speeds();
    return extents_->allocate(slot_class);
}

void VolumeOnPaths::refresh_speeds() noexcept {
    if (shapes_.size() < 2) return;
    const auto rings = static_cast<size_t>(options_.rings);
    const auto speed_of = [&](size_t path) {
        double speed = 0;
        for (size_t r = 0; r < rings; ++r)
            speed += queues_[path * rings + r]->counters().bytes_per_s;
        return speed;
    };
    // Estimates compare with each other only: until every path has one, the initial ones stay.
    for (size_t p = 0; p < shapes_.size(); ++p)
        if (speed_of(p) <= 0) return;
    for (size_t p = 0; p < shapes_.size(); ++p)
        extents_->set_speed(static_cast<int>(p), speed_of(p));
}

bool VolumeOnPaths::try_submit(Operation& operation) noexcept {
    const auto size = static_cast<int64_t>(operation.buffer.size());
    FERRY_CHECK(operation.state != State::queued, "an operation is submitted twice");
    FERRY_CHECK(operation.slot < extents_->slots() && extents_->used(operation.slot),
                "an operation on a slot that is not in use");
    if (in_flight_ == options_.operations_max) return false;
    const SlotPlace& place = extents_->place(operation.slot);
    FERRY_CHECK(size > 0 && operation.offset >= 0 &&
                    operation.offset + size <= slot_bytes(place.slot_class),
                "an operation reaches outside its slot");
    FERRY_CHECK(operation.offset % alignment_ == 0 && size % alignment_ == 0 &&
                    reinterpret_cast<uintptr_t>(operation.buffer.data()) %
                            static_cast<uintptr_t>(alignment_) ==
                        0,
                "an operation is not aligned");
    begin(operation, executor_.now());
    ++in_flight_;
    ++submitted_;
    queue_of(place).submit({.operation = &operation,
                            .verb = operation.kind == Kind::read ? Verb::read : Verb::write,
                            .file = place.file,
                            .file_offset = place.offset + operation.offset,
                            .size_bytes = size});
    return true;
}

Operation* VolumeOnPaths::poll() noexcept {
    // Starts after the queue that answered last, so that no ring is passed over for long.
    for (size_t i = 0; i < queues_.size(); ++i) {
        const size_t at = next_polled_ + i < queues_.size() ? next_polled_ + i
                                                            : next_polled_ + i - queues_.size();
        while (Operation* operation = queues_[at]->poll()) {
            if (is_part(*operation)) {
                end_part(*operation);
                continue;
            }
            next_polled_ = at + 1 < queues_.size() ? at + 1 : 0;
            --in_flight_;
            if (operation->kind == Kind::write && operation->state == State::done) {
                const SlotPlace& place = extents_->place(operation->slot);
                const int64_t begin = place.offset + operation->offset;
                note_written(place.path, place.file, begin, begin + operation->done_bytes);
            }
            return operation;
        }
    }
    return nullptr;
}

void VolumeOnPaths::cancel_queued() noexcept {
    for (const auto& queue : queues_) queue->cancel();
}

// ---------------------------------------------------------------- what it tells

Queue& VolumeOnPaths::queue_of(const SlotPlace& place) const noexcept {
    return *queues_[place.path * static_cast<size_t>(options_.rings) + place.ring];
}

std::string VolumeOnPaths::file_name(int path, int file) const {
    const auto p = static_cast<size_t>(path);
    return files_.empty() ? options_.paths[p].path + "/simulated.slots" + std::to_string(file)
                          : files_[p]->slot_file_name(file);
}

std::string VolumeOnPaths::describe(SlotId slot) const {
    if (slot >= extents_->slots()) return "no slot";
    const SlotPlace& place = extents_->place(slot);
    return file_name(place.path, place.file) + " at " + std::to_string(place.offset);
}

// The copies of the record are there from the start, whatever they hold.
int64_t VolumeOnPaths::reserved_bytes() const noexcept {
    return extents_->reserved_bytes() + 2 * copy_bytes();
}
int64_t VolumeOnPaths::peak_bytes() const noexcept {
    return extents_->peak_bytes() + 2 * copy_bytes();
}

std::vector<PathCounters> VolumeOnPaths::counters() const {
    std::vector<PathCounters> all;
    for (size_t p = 0; p < options_.paths.size(); ++p)
        all.push_back({.path = options_.paths[p].path,
                       .bytes_overhead = files_.empty() ? 0 : files_[p]->bytes_written()});
    for (size_t q = 0; q < queues_.size(); ++q) {
        const QueueCounters one = queues_[q]->counters();
        PathCounters& sum = all[q / static_cast<size_t>(options_.rings)];
        sum.bytes_read += one.bytes_read;
        sum.bytes_written += one.bytes_written;
        sum.bytes_overhead += one.bytes_overhead;
        sum.bytes_retried += one.bytes_retried;
        sum.reads += one.reads;
        sum.writes += one.writes;
        sum.retries += one.retries;
        sum.errors += one.errors;
        sum.read_bytes_per_s += one.read_bytes_per_s;
        sum.write_bytes_per_s += one.write_bytes_per_s;
    }
    for (size_t p = 0; p < all.size(); ++p) {
        const double rated = options_.paths[p].endurance_tbw * 1e12;
        const auto worn = static_cast<double>(all[p].bytes_written + all[p].bytes_overhead);
        if (rated > 0) all[p].endurance_used = worn / rated;
    }
    return all;
}

std::string describe(std::span<const PathCounters> paths, std::string_view indent) {
    std::string text;
    const auto rate = [](double bytes_per_s) {
        char words[32] = "";
        if (bytes_per_s > 0) snprintf(words, sizeof words, " at %.2f GB/s", bytes_per_s * 1e-9);
        return std::string(words);
    };
    const auto add = [&](const PathCounters& path) {
        text.append(text.empty() ? "" : "\n").append(indent).append(one_line(path.path));
        text += ": " + format_bytes(path.bytes_read) + " read" + rate(path.read_bytes_per_s);
        text += ", " + format_bytes(path.bytes_written) + " written" + rate(path.write_bytes_per_s);
        if (path.bytes_overhead > 0)
            text += ", " + format_bytes(path.bytes_overhead) + " besides to lay it out";
    };
    PathCounters all{.path = "all paths"};
    for (const PathCounters& path : paths) {
        add(path);
        all.bytes_read += path.bytes_read;
        all.bytes_written += path.bytes_written;
        all.bytes_overhead += path.bytes_overhead;
        if (path.endurance_used <= 0) continue;
        char share[48];
        const double percent = 100 * path.endurance_used;  // %.2g of 120 is 1.2e+02
        snprintf(share, sizeof share, percent < 10 ? ", %.2g %%" : ", %.0f %%", percent);
        text += std::string(share) + " of its rated life";
    }
    if (paths.size() > 1) add(all);
    return text;
}

}  // namespace ferry::aio
