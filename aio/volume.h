// The one implementation of Volume: extents over files, and a queue for every ring of every path.
#pragma once

#include <memory>
#include <vector>

#include "backend.h"
#include "extents.h"
#include "ferry/aio.h"
#include "files.h"
#include "queue.h"

namespace ferry::aio {

class VolumeOnPaths final : public Volume {
public:
    // With a factory there are no files: the backend it makes is the storage (tests).
    VolumeOnPaths(VolumeOptions options, Executor& executor, const BackendFactory& make_backend);
    ~VolumeOnPaths() override;

    SlotId allocate(int slot_class) noexcept override;
    void free(SlotId slot) noexcept override { extents_->free(slot); }
    void discard_free_slots() override;
    bool try_submit(Operation& operation) noexcept override;
    Operation* poll() noexcept override;
    void cancel_queued() noexcept override;
    int in_flight() const noexcept override { return in_flight_; }
    void flush() override;

    int64_t alignment() const noexcept override { return alignment_; }
    int64_t slot_bytes(int slot_class) const noexcept override {
        return extents_->slot_bytes(slot_class);
    }
    int path_of(SlotId slot) const noexcept override { return extents_->place(slot).path; }
    std::string describe(SlotId slot) const override;
    std::string_view backend_name() const noexcept override { return backend_name_; }
    std::vector<PathCounters> counters() const override;

private:
    // An operation of the volume itself: layout, flush, discard.
    struct Errand {
        Operation operation{};
        Queue* queue = nullptr;
        std::string file{};
        Request request{};
    };

    void check_options() const;
    std::vector<PathShape> open_paths(bool on_files);
    void choose_backend();
    void check_paths_differ() const;
    BackendSetup setup_of(size_t path) const;
    int rings_that_copy() const;
    void retire_queues() noexcept;
    void start_rings(const BackendFactory& make_backend);
    void write_every_slot();
    Errand errand_on(size_t path, int file, Verb verb) const;
    void run_errands(std::vector<Errand>& errands, const char* what);
    void wait_until_finished();
    int64_t unfinished() const noexcept;
    void refresh_speeds() noexcept;
    std::string file_name(int path, int file) const;
    Queue& queue_of(const Place& place) const noexcept;

    const VolumeOptions options_;
    Executor& executor_;
    int64_t alignment_ = 4096;
    std::vector<std::unique_ptr<PathFiles>> files_;  // a path each; none without files
    std::vector<PathShape> shapes_;
    std::unique_ptr<Extents> extents_;
    BackendFactory backend_of_kind_;
    std::string backend_name_;
    std::vector<std::unique_ptr<Queue>> queues_;  // path-major
    size_t hosted_ = 0;                           // of queues_
    size_t next_polled_ = 0;
    int in_flight_ = 0;      // the caller's, until polled
    int64_t submitted_ = 0;  // every request of an operation
    uint32_t allocations_ = 0;
};

std::unique_ptr<Volume> open_volume(VolumeOptions options, Executor& executor,
                                    const BackendFactory& make_backend = {});

}  // namespace ferry::aio
