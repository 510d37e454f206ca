// Transfers that a program waits for or awaits: of slots (aio.cc) and of files (files.cc).
#pragma once

#include <unordered_map>

#include "core.h"

namespace ferry::python {

// What became of a transfer. Its buffer is ferry's until it is done.
struct Outcome {
    bool done = false;
    ferry_status status = FERRY_OK;
    std::string why{};
    int64_t bytes = 0;
    double seconds = 0;
    Array buffer{};
    std::vector<nb::object> futures{};  // asyncio's, of those who await it
};

// Those under way of one handle. Touched with the GIL held.
class Transfers {
public:
    virtual ~Transfers() = default;
    size_t under_way() const { return pending_.size(); }
    // False: nothing ended within that time. Else whatever ended by then is done.
    bool collect_one(int64_t wait_ms) { return collect_some(wait_ms) > 0; }
    // What has ended by now; nothing of one that was closed.
    void collect();
    // Readable when something may have ended, until collect(). Valid until it is closed.
    virtual int32_t descriptor() = 0;
    // Of this object: a descriptor's number is used again.
    const uint64_t number = ++last_number_;
    // `call(address, bytes, priority, tag)` submits it, and returns FERRY_AGAIN where too many are
    // under way.
    template <class Call>
    std::shared_ptr<Outcome> submit(nb::handle buffer, Use use, const std::string& priority,
                                    const Call& call);

protected:
    virtual bool is_open() const = 0;
    // ferry_aio_wait or ferry_files_wait.
    virtual ferry_status wait(int64_t wait_ms, ferry_completion* completion) = 0;
    void all_are_cancelled(const char* why);

private:
    static constexpr size_t kAtOnce = 64;
    struct Ended {
        ferry_completion completion;
        std::string why;
    };
    // Of transfers that are done: who awaits them, and what they hold no more. Other threads may
    // run while it ends.
    struct Told {
        std::vector<nb::object> futures{};
        std::vector<Array> buffers{};
        void resolve();
    };
    static int32_t priority_of(const std::string& word);
    // How many, kAtOnce at most: there may be more.
    size_t collect_some(int64_t wait_ms);
    static void finish(Outcome& outcome, ferry_status status, std::string why, Told& told);
    static inline uint64_t last_number_ = 0;

    std::unordered_map<uint64_t, std::shared_ptr<Outcome>> pending_{};
    uint64_t last_tag_ = 0;
};

struct Transfer {
    std::shared_ptr<Transfers> of{};
    std::shared_ptr<Outcome> outcome{};

    bool is_done() const;    // whatever ended since
    int64_t result() const;  // of one that is done
    int64_t wait() const;
};

template <class Call>
std::shared_ptr<Outcome> Transfers::submit(nb::handle buffer, Use use, const std::string& priority,
                                           const Call& call) {
    const int32_t how = priority_of(priority);
    const auto outcome = std::make_shared<Outcome>();
    outcome->buffer = bytes_in("buffer", buffer, use);
    const uint64_t tag = ++last_tag_;
    pending_[tag] = outcome;
    try {
        const Array& array = outcome->buffer;
        while (!done([&] { return call(array.data, array.bytes, how, tag); })) collect_one(1);
    } catch (...) {
        pending_.erase(tag);
        throw;
    }
    return outcome;
}

}  // namespace ferry::python
