// Where every slot lies, and which slots are free. Slots of a class are equally large, so the
// allocator is a stack of slot numbers per class and path: constant time, nothing to fragment.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ferry/aio.h"

namespace ferry::aio {

struct SlotPlace {
    uint16_t path = 0, ring = 0, file = 0;  // the file is counted within the path
    uint16_t slot_class = 0;
    int64_t offset = 0;  // in the file
};

// The files, rings and room of a path.
struct PathShape {
    std::string name{};  // for messages
    int files = 1, rings = 1;
    int64_t data_offset = 0;     // bytes at the start of each file that are not slots
    int64_t capacity_bytes = 0;  // for slots
    double speed = 1;            // relative to the other paths
};

class Extents {
public:
    // Divides each class over the paths by speed, as far as capacities allow. Where there are
    // several, each gets `slack` times its share besides, if it has room: slots that are only used
    // in exchange for another path's. Throws does_not_fit. `counts` given, of each class on each
    // path: those of an earlier volume, whose slots then lie where they lay.
    using PerPath = std::vector<int64_t>;
    Extents(std::span<const SlotClass> classes, std::span<const PathShape> paths, int64_t alignment,
            double slack = 0, std::vector<PerPath> counts = {});

    const SlotPlace& place(SlotId slot) const noexcept { return places_[slot]; }
    size_t slots() const noexcept { return places_.size(); }
    int64_t slot_bytes(int slot_class) const noexcept {
        return slot_bytes_[static_cast<size_t>(slot_class)];
    }
    int64_t file_bytes(int path, int file) const noexcept {
        return file_bytes_[static_cast<size_t>(path)][static_cast<size_t>(file)];
    }
    bool used(SlotId slot) const noexcept { return used_[slot]; }
    // Bytes of the slots that may be in use at once, and of those that at most were.
    int64_t reserved_bytes() const noexcept { return reserved_bytes_; }
    int64_t peak_bytes() const noexcept { return peak_bytes_; }

    int64_t count(int slot_class, int path) const noexcept {
        return counts_[static_cast<size_t>(slot_class)][static_cast<size_t>(path)];
    }

    SlotId allocate(int slot_class) noexcept;
    // Exactly these, which are in no particular order. False, and nothing is taken: one of them is
    // none of the class's, is in use, or is named twice.
    bool take(int slot_class, std::span<const SlotId> slots);
    void free(SlotId slot) noexcept;
    void set_speed(int path, double speed) noexcept { speed_[static_cast<size_t>(path)] = speed; }

private:
    struct Pool {  // the slots of one class on one path
        std::vector<SlotId> free;
        int64_t used = 0;
    };

    std::vector<PerPath> divide(std::span<const SlotClass> classes,
                                std::span<const PathShape> paths, double slack) const;
    void count_used(int slot_class, int64_t slots) noexcept;
    void lay_out(int slot_class, int path, const PathShape& shape, int64_t count);
    Pool& pool(int slot_class, size_t path) noexcept {
        return pools_[static_cast<size_t>(slot_class) * speed_.size() + path];
    }

    std::vector<int64_t> slot_bytes_, unused_;  // a class each; unused: how many may be allocated
    int64_t reserved_bytes_ = 0, used_bytes_ = 0, peak_bytes_ = 0;
    std::vector<double> speed_;
    std::vector<SlotPlace> places_;
    std::vector<bool> used_;
    std::vector<Pool> pools_;
    std::vector<PerPath> file_bytes_, counts_;
};

}  // namespace ferry::aio
