// The one implementation of Volume: extents over files, and a queue for every ring of every path.
#pragma once

#include <memory>
#include <vector>

#include "backend.h"
#include "buffer.h"
#include "extents.h"
#include "ferry/aio.h"
#include "files.h"
#include "queue.h"

namespace ferry::aio {

class VolumeOnPaths : public Volume {
public:
    // With a factory there are no files: the backend it makes is the storage (tests).
    VolumeOnPaths(VolumeOptions options, Executor& executor, const BackendFactory& make_backend);
    ~VolumeOnPaths() override;

    SlotId allocate(int slot_class) noexcept override;
    void free(SlotId slot) noexcept override { extents_->free(slot); }
    void discard_free_slots() override;
    void finish_layout() override;
    bool try_submit(Operation& operation) noexcept override;
    Operation* poll() noexcept override;
    void cancel_queued() noexcept override;
    int in_flight() const noexcept override { return in_flight_; }
    void flush() override;
    void note_step(int64_t step) noexcept override;
    int64_t noted_step() const noexcept override;
    void note_lost() noexcept override;

    std::span<std::byte> record() noexcept override;
    void publish(int64_t bytes) noexcept override;
    bool published() override;
    std::string missing() const override;
    std::span<const std::byte> found_record(size_t n) const override;
    void resume_from(size_t n) noexcept override;
    bool take(int slot_class, std::span<const SlotId> slots) override {
        return extents_->take(slot_class, slots);
    }

    int64_t alignment() const noexcept override { return alignment_; }
    int64_t slot_bytes(int slot_class) const noexcept override {
        return extents_->slot_bytes(slot_class);
    }
    int path_of(SlotId slot) const noexcept override { return extents_->place(slot).path; }
    std::string describe(SlotId slot) const override;
    std::string_view backend_name() const noexcept override { return backend_name_; }
    bool direct(int path) const noexcept override {
        return files_.empty() ? options_.direct : files_[static_cast<size_t>(path)]->direct();
    }
    std::vector<PathCounters> counters() const override;
    int64_t reserved_bytes() const noexcept override;
    int64_t peak_bytes() const noexcept override;

private:
    // Operations of the volume's own at a time, beside the caller's.
    static constexpr size_t kOwnOpsMax = 32;
    // An operation of the volume itself: layout, flush, discard, publication.
    struct OwnOp {
        Operation operation{};
        size_t path = 0;
        Request request{};
    };

    void check_options() const;
    std::vector<PathShape> open_paths(bool on_files);
    void check_paths_differ() const;
    BackendSetup setup_of(size_t path) const;
    int rings_that_copy() const;
    void retire_queues() noexcept;
    void start_rings(const BackendFactory& make_backend);
    void prepare_layout();
    OwnOp own_op_on(size_t path, int file, Verb verb) const;
    void run_own_ops(size_t count, const char* what);
    template <class Next>
    void run_all(const char* what, const Next& next);
    bool only_unsupported() noexcept;
    bool next_discard(SlotId& slot, OwnOp& own_op) const noexcept;
    AlignedBuffer layout_pattern(int64_t bytes) const;
    OwnOp layout_write(size_t path, int file, int64_t file_offset,
                       std::span<std::byte> pattern) const;
    void note_written(size_t path, size_t file, int64_t begin, int64_t end) noexcept;
    Error error_of(const OwnOp& own_op, const char* what) const;
    void wait_until_finished();
    int64_t unfinished() const noexcept;
    int64_t file_end(size_t path, int file) const noexcept;

    // volume_record.cc. Publication: data, then the record, then that it is there.
    enum class Phase : uint8_t { none, data, record, seal };
    bool resumes() const noexcept { return options_.leftover == Leftover::resume; }
    int64_t copy_bytes() const noexcept;  // each of two copies; 0: no record is kept
    std::vector<Extents::PerPath> counts_to_resume() const;
    void check_layout_to_resume(size_t path) const;
    void describe_layout();
    void prepare_record();
    void find_records();
    OwnOp own_op_on_copy(int copy, Verb verb, std::span<std::byte> buffer) const;
    void start(Phase phase) noexcept;
    void start_part(OwnOp& own_op) noexcept;
    bool is_part(const Operation& operation) const noexcept;
    void end_part(const Operation& operation) noexcept;

    void refresh_speeds() noexcept;
    std::string file_name(int path, int file) const;
    Queue& queue_of(const SlotPlace& place) const noexcept;
    Queue& queue_of(const OwnOp& own_op) const noexcept;

    const VolumeOptions options_;
    Executor& executor_;
    int64_t alignment_ = 4096;
    std::vector<std::unique_ptr<PathFiles>> files_;  // a path each; none without files
    std::vector<PathShape> shapes_;
    std::unique_ptr<Extents> extents_;
    std::string backend_name_;
    std::vector<std::unique_ptr<Queue>> queues_;  // path-major
    std::vector<OwnOp> own_ops_;                  // kOwnOpsMax of them
    std::vector<bool> discards_;                  // a path each: it knows how to
    // The I/O blocks of each file of each path that need no layout. Empty once it is finished.
    std::vector<std::vector<std::vector<bool>>> written_;
    size_t hosted_ = 0;  // the queue that hosts the volume's own operations
    size_t next_polled_ = 0;
    int in_flight_ = 0;      // the caller's, until polled
    int64_t submitted_ = 0;  // every request of an operation
    uint32_t allocations_ = 0;

    struct Found {
        uint64_t sequence = 0;
        int copy = 0;
        int64_t bytes = 0;
        AlignedBuffer memory{};
    };
    std::vector<Found> found_;       // newest first
    std::vector<Error> unreadable_;  // copies of the record
    AlignedBuffer record_;           // the next copy
    uint64_t record_key_ = 0, sequence_ = 0;
    int next_copy_ = 0;
    Phase phase_ = Phase::none;
    std::vector<OwnOp> parts_;  // a publication's flushes, one a file, and its write
    int parts_under_way_ = 0;
    bool part_failed_ = false, kept_ = false;
};

std::unique_ptr<Volume> open_volume(VolumeOptions options, Executor& executor,
                                    const BackendFactory& make_backend = {});

}  // namespace ferry::aio
