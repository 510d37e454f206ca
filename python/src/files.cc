// Files of the program's own, at any offset.
#include <nanobind/stl/shared_ptr.h>

#include "transfers.h"

namespace ferry::python {
namespace {

using FilesHandle = Handle<ferry_files, ferry_files_destroy>;

class Files : public Transfers {
public:
    FilesHandle handle{};

    void close() {
        ferry_files* const mine = std::exchange(handle.ticket, nullptr);
        if (mine) done([&] { return ferry_files_destroy(mine); });
        all_are_cancelled("ferry_files: closed before the transfer ended");
    }

    int32_t descriptor() override {
        int32_t descriptor = -1;
        done([&] { return ferry_files_descriptor(handle.ticket, &descriptor); });
        return descriptor;
    }

protected:
    bool is_open() const override { return handle.ticket != nullptr; }
    ferry_status wait(int64_t wait_ms, ferry_completion* completion) override {
        return ferry_files_wait(handle.ticket, wait_ms, completion);
    }
};

std::shared_ptr<Files> create(nb::handle block, const std::string& backend, int32_t queue_depth,
                              int32_t operations_max, int32_t files_max, bool direct) {
    auto options = sized<ferry_files_options>();
    options.block_bytes = bytes_of(block);
    options.backend = choice("backend", backend, {"auto", "uring", "posix"});
    options.queue_depth = queue_depth;
    options.operations_max = operations_max;
    options.files_max = files_max;
    options.buffered = !direct;
    auto made = std::make_shared<Files>();
    done([&] { return ferry_files_create(&options, &made->handle.ticket); });
    return made;
}

// A path, or the descriptor of an open file.
uint32_t open(Files& self, nb::handle file, const std::string& mode) {
    const int32_t use = choice("mode", mode, {"read", "write"});
    uint32_t number = 0;
    if (nb::isinstance<nb::int_>(file)) {
        const auto descriptor = nb::cast<int32_t>(file);
        done([&] { return ferry_files_open_descriptor(self.handle.ticket, descriptor, &number); });
        return number;
    }
    const std::string path = path_in(file);
    done([&] { return ferry_files_open(self.handle.ticket, path.c_str(), use, &number); });
    return number;
}

Transfer submit(const std::shared_ptr<Files>& self, bool writes, uint32_t file, nb::handle buffer,
                int64_t offset, const std::string& priority) {
    const auto call = [&](void* data, int64_t bytes, int32_t how, uint64_t tag) {
        ferry_files* const files = self->handle.ticket;
        return writes ? ferry_files_write(files, file, offset, data, bytes, how, tag)
                      : ferry_files_read(files, file, offset, data, bytes, how, tag);
    };
    return {.of = self,
            .outcome = self->submit(buffer, writes ? Use::reads : Use::writes, priority, call)};
}

template <bool kWrites>
auto submits() {
    return [](const std::shared_ptr<Files>& self, uint32_t file, nb::handle buffer, int64_t offset,
              const std::string& priority) {
        return submit(self, kWrites, file, buffer, offset, priority);
    };
}
template <bool kWrites>
auto moves() {
    return
        [](const std::shared_ptr<Files>& self, uint32_t file, nb::handle buffer, int64_t offset) {
            return submit(self, kWrites, file, buffer, offset, "normal").wait();
        };
}

void bind_transfers(nb::class_<Files>& bound) {
    bound
        .def("read", moves<false>(), "file"_a, "buffer"_a, "offset"_a = 0,
             "Fills the buffer from the file, and waits for it.")
        .def("write", moves<true>(), "file"_a, "buffer"_a, "offset"_a = 0,
             "Writes the buffer into the file, and waits for it.")
        .def("submit_read", submits<false>(), "file"_a, "buffer"_a, "offset"_a = 0,
             "priority"_a = "normal", "Begins a read. The buffer is ferry's until it is done.")
        .def("submit_write", submits<true>(), "file"_a, "buffer"_a, "offset"_a = 0,
             "priority"_a = "normal", "Begins a write. The buffer is ferry's until it is done.")
        .def(
            "cancel",
            [](Files& self) { done([&] { return ferry_files_cancel(self.handle.ticket); }); },
            "What has not begun ends as cancelled.");
}

}  // namespace

void bind_files(nb::module_& module) {
    nb::class_<Files> bound(
        module, "Files",
        "Asynchronous I/O in files of the program's own, at any offset, from any memory. What "
        "lies at multiples of 4096, in memory and in the file, goes around the page cache.");
    bound
        .def(nb::new_(&create), nb::kw_only(), "block"_a = 0, "backend"_a = "auto",
             "queue_depth"_a = 0, "operations_max"_a = 0, "files_max"_a = 0, "direct"_a = true)
        .def("open", &open, "file"_a, "mode"_a = "read",
             "A number for a path, or for a file that is open already (its descriptor). "
             "\"write\" may read too, creates the file and cuts nothing off.")
        .def(
            "size",
            [](Files& self, uint32_t file) {
                int64_t bytes = 0;
                done([&] { return ferry_files_size(self.handle.ticket, file, &bytes); });
                return bytes;
            },
            "file"_a, "Bytes of it now.")
        .def(
            "flush",
            [](Files& self, uint32_t file) {
                done([&] { return ferry_files_flush(self.handle.ticket, file); });
            },
            "file"_a, "Waits until all that is done of it is on stable storage.")
        .def(
            "close_file",
            [](Files& self, uint32_t file) {
                while (self.collect_one(0)) {
                }
                done([&] { return ferry_files_close(self.handle.ticket, file); });
            },
            "file"_a)
        .def_prop_ro("in_flight", [](Files& self) { return self.under_way(); })
        .def(
            "fileno", [](Files& self) { return self.descriptor(); },
            "A descriptor for select or epoll: readable when transfers may have ended, until one's "
            "done() has found none. It ends with this object.")
        .def("close", &Files::close,
             "Cancels what has not begun, waits for the rest, closes the files.")
        .def("__enter__", [](nb::object self) { return self; })
        .def("__exit__", [](Files& self, const nb::args&) { self.close(); });
    bind_transfers(bound);
}

}  // namespace ferry::python
