// Slots of files.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include "transfers.h"

namespace ferry::python {
namespace {

using AioHandle = Handle<ferry_aio, ferry_aio_close>;

class Aio : public Transfers {
public:
    AioHandle handle{};

    void close() {
        ferry_aio* const mine = std::exchange(handle.ticket, nullptr);
        if (mine) done([&] { return ferry_aio_close(mine); });
        all_are_cancelled("ferry_aio: closed before the transfer ended");
    }

    int32_t descriptor() override {
        int32_t descriptor = -1;
        done([&] { return ferry_aio_descriptor(handle.ticket, &descriptor); });
        return descriptor;
    }

protected:
    bool is_open() const override { return handle.ticket != nullptr; }
    ferry_status wait(int64_t wait_ms, ferry_completion* completion) override {
        return ferry_aio_wait(handle.ticket, wait_ms, completion);
    }
};

Transfer submit(const std::shared_ptr<Aio>& self, bool writes, uint32_t slot, nb::handle buffer,
                int64_t offset, const std::string& priority) {
    const auto call = [&](void* data, int64_t bytes, int32_t how, uint64_t tag) {
        ferry_aio* const aio = self->handle.ticket;
        return writes ? ferry_aio_write(aio, slot, offset, data, bytes, how, tag)
                      : ferry_aio_read(aio, slot, offset, data, bytes, how, tag);
    };
    return {.of = self,
            .outcome = self->submit(buffer, writes ? Use::reads : Use::writes, priority, call)};
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
        .def_prop_ro("in_flight", [](Aio& self) { return self.under_way(); })
        .def(
            "fileno", [](Aio& self) { return self.descriptor(); },
            "A descriptor for select or epoll: readable when transfers may have ended, until one's "
            "done() has found none. It ends with this object.")
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
