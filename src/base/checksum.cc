#include <xxhash.h>

#include <new>

#include "base/checksum.h"

namespace ferry {

struct RunningChecksum::State {
    struct Free {
        void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
    };
    std::unique_ptr<XXH3_state_t, Free> hash{XXH3_createState()};
};

RunningChecksum::RunningChecksum() : state_(std::make_unique<State>()) {
    if (!state_->hash) throw std::bad_alloc();
    XXH3_64bits_reset(state_->hash.get());
}

RunningChecksum::~RunningChecksum() = default;

void RunningChecksum::add(std::span<const std::byte> bytes) noexcept {
    XXH3_64bits_update(state_->hash.get(), bytes.data(), bytes.size());
}

uint64_t RunningChecksum::value() const noexcept { return XXH3_64bits_digest(state_->hash.get()); }

}  // namespace ferry
