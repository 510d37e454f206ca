// Volumes to measure on, and what keeps one busy with one kind of access and counts what it did.
#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/aio.h"
#include "ferry/pinned_mem.h"
#include "io_settings.h"
#include "topology/topology.h"

namespace ferry::tools {

enum class Direction : uint8_t { read, write, mixed };

struct AccessPattern {
    Direction direction = Direction::read;
    bool random = false;

    bool operator==(const AccessPattern&) const = default;
};

// "read", "write", "mixed", "randread", "randwrite", "randmixed".
std::string name_of(AccessPattern access);
std::optional<AccessPattern> pattern_from_name(std::string_view name);

// Transfers of one block each. A mixed load reads in the lower half of the slots and writes in the
// upper one, in turns; a sequential one starts over at the end.
struct Load {
    AccessPattern access{};
    int64_t block_bytes = kMiB;
    double seconds = 0.5;
    int64_t bytes_most = std::numeric_limits<int64_t>::max();  // read and written; or until then
    bool integrity = false;  // seals what it writes, verifies what it read
};

struct RigOptions {
    std::vector<std::string> directories{};
    int64_t bytes_per_path = kGiB;
    int depth = 32;  // transfers in flight on each ring
    int rings = 1;   // rings for each path
    aio::BackendKind backend = aio::BackendKind::automatic;
    bool direct = true;
    int hashers = 1;  // threads that seal and verify; 1: the one that submits
};

constexpr int64_t kSlotBytes = 16 * kMiB;  // and the largest block

// Operations kept going: what the rings have in flight, and a few that wait their turn, so that a
// ring never waits for the caller.
int operations_of(const RigOptions& options);
// The bytes that files on each path need for this: twice as many blocks as are kept going, and a
// slot for every ring.
int64_t file_bytes_needed(const RigOptions& options, int64_t block_bytes);
// Where there is little room on the paths fewer rings, fewer transfers at a time, and then smaller
// ones: the size of a block.
int64_t fit_into_files(RigOptions& options, int64_t block_bytes);

// Memory for the buffers, on huge pages, filled with bytes that no drive can compress.
class IoMemory {
public:
    // Throws does_not_fit above limit().
    explicit IoMemory(int64_t bytes);
    static int64_t limit();  // a quarter of the machine's memory
    std::span<std::byte> bytes() const noexcept { return bytes_; }

private:
    Topology topology_;
    pinned_mem::Pool pool_;
    std::span<std::byte> bytes_{};
};

// A volume laid out and written, and operations on it. One thread uses it.
class Rig {
public:
    // `memory` is for the buffers, operations_of() blocks, and is registered with the rings; it
    // outlives the rig.
    Rig(const RigOptions& options, std::span<std::byte> memory);
    ~Rig();
    Rig(const Rig&) = delete;
    Rig& operator=(const Rig&) = delete;

    // Ends early when interrupted. Throws Error when an operation failed or bytes came back wrong.
    Sample run(const Load& load);
    // Somebody else wrote to the files: what was sealed is gone.
    void forget() noexcept;

    std::vector<std::string> files() const;  // full names
    std::string_view backend_name() const noexcept;
    bool direct() const noexcept;  // obtained on every path

private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace ferry::tools
