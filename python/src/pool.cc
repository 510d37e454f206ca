// Pinned memory under a budget.
#include "core.h"

namespace ferry::python {
namespace {

using PoolHandle = Handle<ferry_pool, ferry_pool_destroy>;

struct Pool {
    std::shared_ptr<PoolHandle> handle = std::make_shared<PoolHandle>();
    ferry_pool* ticket() const { return handle->ticket; }
};

void create(Pool* self, nb::handle budget, int32_t threads, const std::string& lock_for,
            int32_t gpu) {
    Pool made;
    auto options = sized<ferry_pool_options>();
    options.budget_bytes = bytes_of(budget);
    options.threads = threads;
    options.lock_for = choice("lock_for", lock_for, {"cpu", "cuda"});
    options.gpu = gpu;
    done([&] { return ferry_pool_create(&options, &made.handle->ticket); });
    new (self) Pool(std::move(made));
}

Memory reserve(Pool& self, nb::handle size, const std::string& name) {
    Memory memory{.bytes = bytes_of(size), .owner = self.handle};
    whole_text("a name", name);
    done([&] {
        return ferry_pool_reserve(self.ticket(), name.c_str(), memory.bytes, &memory.data);
    });
    return memory;
}

}  // namespace

void bind_pool(nb::module_& module) {
    nb::class_<Pool>(module, "Pool",
                     "Host memory on huge pages under a budget, page-locked for a GPU or not.")
        .def("__init__", &create, "budget"_a, nb::kw_only(), "threads"_a = 0, "lock_for"_a = "cpu",
             "gpu"_a = 0)
        .def("reserve", &reserve, "size"_a, "name"_a = "buffer",
             "Zeroed memory, aligned to 2 MiB, until the pool is closed and nobody uses it.")
        .def(
            "seal", [](Pool& self) { done([&] { return ferry_pool_seal(self.ticket()); }); },
            "A later reserve() is refused.")
        .def_prop_ro("reserved_bytes",
                     [](Pool& self) {
                         int64_t bytes = 0;
                         done([&] { return ferry_pool_reserved_bytes(self.ticket(), &bytes); });
                         return bytes;
                     })
        .def(
            "close", [](Pool& self) { close_unused(self.handle); },
            "Gives the memory back. Refused while arrays use it.")
        .def("__enter__", [](nb::object self) { return self; })
        .def("__exit__", [](Pool& self, const nb::args&) { close_unused(self.handle); });
}

}  // namespace ferry::python
