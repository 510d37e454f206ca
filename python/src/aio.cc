// Slots of files, and transfers that a program waits for or awaits.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include <unordered_map>

#include "core.h"

namespace ferry::python {
namespace {

using AioHandle = Handle<ferry_aio, ferry_aio_close>;

// The outcome of a transfer. Its buffer is ferry's until it is done.
struct Outcome {
    bool done = false;
    ferry_status status = FERRY_OK;
    std::string why{};
    int64_t bytes = 0;
    double seconds = 0;
    Array buffer{};
};

// Touched with the GIL held.
class Aio {
public:
    AioHandle handle{};
    std::unordered_map<uint64_t, std::shared_ptr<Outcome>> pending{};
    uint64_t last_tag = 0;

    void completed(const ferry_completion& completion, std::string why) {
        const auto found = pending.find(completion.tag);
        if (found == pending.end()) return;
        finish(*found->second, completion.status, std::move(why));
        found->second->bytes = completion.bytes;
        found->second->seconds = completion.seconds;
        pending.erase(found);
    }
    // False: nothing ended within that time.
    bool collect_one(int64_t wait_ms) {
        auto completion = sized<ferry_completion>();
        std::string why;
        const bool one = done([&] {
            const ferry_status status = ferry_aio_wait(handle.ticket, wait_ms, &completion);
            if (status == FERRY_OK && completion.status == FERRY_IO) why = ferry_last_error();
            return status;
        });
        if (one) completed(completion, std::move(why));
        return one;
    }
    void close() {
        ferry_aio* const mine = std::exchange(handle.ticket, nullptr);
        if (mine) done([&] { return ferry_aio_close(mine); });
        for (auto& [tag, outcome] : pending)
            finish(*outcome, FERRY_CANCELLED, "ferry_aio: closed before the transfer ended");
        pending.clear();
    }

private:
    static void finish(Outcome& outcome, ferry_status status, std::string why) {
        outcome.done = true;
        outcome.status = status;
        outcome.why = status == FERRY_CANCELLED && why.empty()
                          ? "ferry_aio_cancel: the transfer was cancelled before it began"
                          : std::move(why);
        outcome.buffer = {};
    }
};

struct Transfer {
    std::shared_ptr<Aio> aio{};
    std::shared_ptr<Outcome> outcome{};

    // Whatever ended since.
    bool is_done() const {
        while (!outcome->done && aio->collect_one(0)) {
        }
        return outcome->done;
    }
    int64_t result() const {
        if (outcome->status != FERRY_OK) raise(outcome->status, outcome->why);
        return outcome->bytes;
    }
    // Another thread may collect this one: it is looked at again soon.
    int64_t wait() const {
        constexpr int64_t kLookAgainMs = 2;
        while (!outcome->done) aio->collect_one(kLookAgainMs);
        return result();
    }
};

constexpr auto kPriorities = {"normal", "urgent", "background"};

Transfer submit(const std::shared_ptr<Aio>& self, bool writes, uint32_t slot, nb::handle buffer,
                int64_t offset, const std::string& priority) {
    const int32_t how = choice("priority", priority, {kPriorities.begin(), kPriorities.end()});
    Transfer transfer{.aio = self, .outcome = std::make_shared<Outcome>()};
    transfer.outcome->buffer = bytes_in("buffer", buffer, writes ? Use::reads : Use::writes);
    const Array& bytes = transfer.outcome->buffer;
    const uint64_t tag = ++self->last_tag;
    self->pending[tag] = transfer.outcome;
    const auto call = [&] {
        return writes ? ferry_aio_write(self->handle.ticket, slot, offset, bytes.data, bytes.bytes,
                                        how, tag)
                      : ferry_aio_read(self->handle.ticket, slot, offset, bytes.data, bytes.bytes,
                                       how, tag);
    };
    try {
        while (!done(call)) self->collect_one(1);  // as many as may be are under way
    } catch (...) {
        self->pending.erase(tag);
        throw;
    }
    return transfer;
}

// [(bytes of a slot, slots), ...]
using Classes = std::vector<std::pair<nb::object, int64_t>>;

void open(std::shared_ptr<Aio>& into, nb::handle paths, const Classes& slots, nb::handle block,
          const std::string& backend, int32_t queue_depth, int32_t operations_max, int32_t rings,
          bool direct, bool layout) {
    const Paths given(paths);
    std::vector<ferry_slot_class> classes;
    for (const auto& [size, count] : slots) {
        auto one = sized<ferry_slot_class>();
        one.slot_bytes = bytes_of(size);
        one.slots = count;
        classes.push_back(one);
    }
    auto options = sized<ferry_aio_options>();
    options.paths = given.list.data();
    options.path_count = given.list.size();
    options.classes = classes.data();
    options.class_count = classes.size();
    options.block_bytes = bytes_of(block);
    options.backend = choice("backend", backend, {"auto", "uring", "posix"});
    options.queue_depth = queue_depth;
    options.operations_max = operations_max;
    options.rings = rings;
    options.buffered = !direct;
    options.no_layout = !layout;
    into = std::make_shared<Aio>();
    done([&] { return ferry_aio_open(&options, &into->handle.ticket); });
}

int64_t alignment(Aio& self) {
    int64_t bytes = 0;
    done([&] { return ferry_aio_alignment(self.handle.ticket, &bytes); });
    return bytes;
}

std::optional<uint32_t> allocate(Aio& self, int32_t slot_class) {
    uint32_t slot = 0;
    if (!done([&] { return ferry_aio_allocate(self.handle.ticket, slot_class, &slot); }))
        return std::nullopt;
    return slot;
}

void bind_transfer(nb::module_& module) {
    nb::class_<Transfer>(module, "Transfer",
                         "A read or write under way: wait() for it, or await it in asyncio.")
        .def("done", &Transfer::is_done, "Whether it has ended. Never waits.")
        .def("wait", &Transfer::wait, "The bytes moved; raises what went wrong.")
        .def("result", &Transfer::result, "As wait(), of one that is done.")
        .def_prop_ro("seconds", [](const Transfer& self) { return self.outcome->seconds; })
        .def(
            "__await__",
            [](nb::handle self) {
                return nb::module_::import_("ferry_offload.waiting").attr("of")(self);
            },
            nb::sig("def __await__(self) -> typing.Generator[typing.Any, None, int]"));
}

void bind_stats(nb::module_& module) {
    nb::class_<ferry_path_stats>(module, "PathStats")
        .def_ro("bytes_read", &ferry_path_stats::bytes_read)
        .def_ro("bytes_written", &ferry_path_stats::bytes_written)
        .def_ro("bytes_overhead", &ferry_path_stats::bytes_overhead)
        .def_ro("reads", &ferry_path_stats::reads)
        .def_ro("writes", &ferry_path_stats::writes)
        .def_ro("retries", &ferry_path_stats::retries)
        .def_ro("errors", &ferry_path_stats::errors)
        .def_ro("read_bytes_per_s", &ferry_path_stats::read_bytes_per_s)
        .def_ro("write_bytes_per_s", &ferry_path_stats::write_bytes_per_s)
        .def_ro("endurance_used", &ferry_path_stats::endurance_used)
        .def("__repr__", &shown);
}

template <bool kWrites>
auto submits() {
    return [](const std::shared_ptr<Aio>& self, uint32_t slot, nb::handle buffer, int64_t offset,
              const std::string& priority) {
        return submit(self, kWrites, slot, buffer, offset, priority);
    };
}
template <bool kWrites>
auto moves() {
    return [](const std::shared_ptr<Aio>& self, uint32_t slot, nb::handle buffer, int64_t offset) {
        return submit(self, kWrites, slot, buffer, offset, "normal").wait();
    };
}

void bind_transfers(nb::class_<Aio>& bound) {
    bound
        .def("read", moves<false>(), "slot"_a, "buffer"_a, "offset"_a = 0,
             "Fills the buffer from the slot, and waits for it.")
        .def("write", moves<true>(), "slot"_a, "buffer"_a, "offset"_a = 0,
             "Writes the buffer into the slot, and waits for it.")
        .def("submit_read", submits<false>(), "slot"_a, "buffer"_a, "offset"_a = 0,
             "priority"_a = "normal", "Begins a read. The buffer is ferry's until it is done.")
        .def("submit_write", submits<true>(), "slot"_a, "buffer"_a, "offset"_a = 0,
             "priority"_a = "normal", "Begins a write. The buffer is ferry's until it is done.")
        .def(
            "cancel", [](Aio& self) { done([&] { return ferry_aio_cancel(self.handle.ticket); }); },
            "What has not begun ends as cancelled.")
        .def(
            "flush", [](Aio& self) { done([&] { return ferry_aio_flush(self.handle.ticket); }); },
            "Waits until all that is done is on stable storage.");
}

}  // namespace

void bind_aio(nb::module_& module) {
    bind_transfer(module);
    bind_stats(module);
    nb::class_<Aio> bound(module, "Aio", "Asynchronous I/O in fixed slots of preallocated files.");
    bound
        .def(nb::new_([](nb::handle paths, const Classes& slots, nb::handle block,
                         const std::string& backend, int32_t queue_depth, int32_t operations_max,
                         int32_t rings, bool direct, bool layout) {
                 std::shared_ptr<Aio> made;
                 open(made, paths, slots, block, backend, queue_depth, operations_max, rings,
                      direct, layout);
                 return made;
             }),
             "paths"_a, "slots"_a, nb::kw_only(), "block"_a = 0, "backend"_a = "auto",
             "queue_depth"_a = 0, "operations_max"_a = 0, "rings"_a = 0, "direct"_a = true,
             "layout"_a = true, "slots: a list of (bytes of a slot, how many), a class each.")
        .def_prop_ro("alignment", &alignment,
                     "Addresses, offsets and sizes of transfers are multiples of it.")
        .def(
            "slot_bytes",
            [](Aio& self, int32_t slot_class) {
                int64_t bytes = 0;
                done([&] { return ferry_aio_slot_bytes(self.handle.ticket, slot_class, &bytes); });
                return bytes;
            },
            "slot_class"_a = 0)
        .def("allocate", &allocate, "slot_class"_a = 0, "A free slot, or None where there is none.")
        .def(
            "free",
            [](Aio& self, uint32_t slot) {
                while (self.collect_one(0)) {
                }
                done([&] { return ferry_aio_free(self.handle.ticket, slot); });
            },
            "slot"_a)
        .def_prop_ro("in_flight", [](Aio& self) { return self.pending.size(); })
        .def(
            "stats",
            [](Aio& self, size_t path) {
                auto stats = sized<ferry_path_stats>();
                done([&] { return ferry_aio_stats(self.handle.ticket, path, &stats); });
                return stats;
            },
            "path"_a = 0)
        .def("close", &Aio::close, "Cancels what has not begun, waits for the rest.")
        .def("__enter__", [](nb::object self) { return self; })
        .def("__exit__", [](Aio& self, const nb::args&) { self.close(); });
    bind_transfers(bound);
}

}  // namespace ferry::python
