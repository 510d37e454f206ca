// The tiered store: objects by leases.
#include "core.h"

namespace ferry::python {
namespace {

class StoreHandle : public Handle<ferry_store, ferry_store_destroy> {
public:
    // Leases and arrays that are held keep their memory, and no file stays behind.
    void close_at_exit() noexcept override {
        if (weak_from_this().use_count() <= 1) return close_while_others_run();
        ferry_store* const mine = std::exchange(ticket, nullptr);
        if (!mine) return;
        const OthersRun others_run;
        ferry_store_abandon(mine);
    }
};

struct Store {
    std::shared_ptr<StoreHandle> handle = std::make_shared<StoreHandle>();
    std::vector<int64_t> sizes{};  // of the objects
    ferry_store* ticket() const { return handle->ticket; }
};

class Lease : public Memory {
public:
    Lease(std::shared_ptr<StoreHandle> store, uint32_t object, int32_t access, int64_t size)
        : object_(object), store_(std::move(store)) {
        done([&] { return ferry_store_acquire(store_->ticket, object, access, &lease_, &data); });
        owner = store_;
        bytes = size;
        read_only = access == FERRY_READ;
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    // A lease that nobody gave back is not to keep its object for good.
    ~Lease() {
        if (!released()) ferry_store_release(store_->ticket, lease_);
    }
    void release() {
        ferry_store* const store = store_ ? store_->ticket : nullptr;  // another thread may release
        done([&] { return ferry_store_release(store, lease_); });
        if (exported) kept_ = owner;
        owner.reset();
        store_.reset();
    }
    bool released() const { return !store_; }
    uint32_t object() const { return object_; }

private:
    const uint32_t object_;
    std::shared_ptr<StoreHandle> store_;
    std::shared_ptr<void> kept_{};  // memory that whoever has this lease may use still
    uint64_t lease_ = 0;
};

void create(Store* self, nb::handle host, nb::handle paths, int64_t buffers, int64_t spare_buffers,
            int32_t threads, const std::string& lock_for, int32_t gpu, const std::string& backend,
            int32_t queue_depth, bool verify) {
    Store made;
    const Paths given(paths);
    auto options = sized<ferry_store_options>();
    options.paths = given.list.data();
    options.path_count = given.list.size();
    options.host_bytes = bytes_of(host);
    options.buffers = buffers;
    options.spare_buffers = spare_buffers;
    options.threads = threads;
    options.lock_for = choice("lock_for", lock_for, {"cpu", "cuda"});
    options.gpu = gpu;
    options.backend = choice("backend", backend, {"auto", "uring", "posix"});
    options.queue_depth = queue_depth;
    options.no_verify = !verify;
    done([&] { return ferry_store_create(&options, &made.handle->ticket); });
    new (self) Store(std::move(made));
}

uint32_t add(Store& self, nb::handle size, const std::string& home) {
    const int64_t bytes = bytes_of(size);
    const int32_t where = choice("home", home, {"host", "nvme"});
    uint32_t object = 0;
    done([&] { return ferry_store_register(self.ticket(), bytes, where, &object); });
    self.sizes.push_back(bytes);
    return object;
}

std::unique_ptr<Lease> acquire(Store& self, uint32_t object, const std::string& access) {
    const int32_t how = choice("access", access, {"read", "write", "overwrite"});
    const int64_t size = object < self.sizes.size() ? self.sizes[object] : 0;
    return std::make_unique<Lease>(self.handle, object, how, size);
}

void bind_lease(nb::module_& module) {
    nb::class_<Lease, Memory>(
        module, "Lease",
        "The right to an object's bytes until it is released. Arrays made of it stay mapped after "
        "that, but their bytes are the store's again: do not use them. Delete them before the "
        "store is closed.")
        .def_prop_ro("object", &Lease::object)
        .def_prop_ro("released", &Lease::released)
        .def("release", &Lease::release,
             "Never waits for storage. What was written is stored when the buffer is needed.")
        .def("__enter__", [](nb::object self) { return self; })
        .def("__exit__", [](Lease& self, const nb::args&) {
            if (!self.released()) self.release();
        });
}

void bind_stats(nb::module_& module) {
    nb::class_<ferry_store_stats>(module, "StoreStats")
        .def_ro("acquired", &ferry_store_stats::acquired)
        .def_ro("hits", &ferry_store_stats::hits, "leases without I/O and without a wait")
        .def_ro("reads", &ferry_store_stats::reads)
        .def_ro("writes", &ferry_store_stats::writes)
        .def_ro("leased", &ferry_store_stats::leased)
        .def_ro("buffers", &ferry_store_stats::buffers)
        .def_ro("host_bytes", &ferry_store_stats::host_bytes)
        .def_ro("nvme_bytes", &ferry_store_stats::nvme_bytes)
        .def("__repr__", &shown);
}

}  // namespace

void bind_store(nb::module_& module) {
    bind_lease(module);
    bind_stats(module);
    nb::class_<Store>(module, "Store",
                      "Objects of any sizes, at home in host memory or on NVMe: register, open, "
                      "then acquire and release.")
        .def("__init__", &create, "host"_a, "paths"_a = nb::none(), nb::kw_only(), "buffers"_a = 0,
             "spare_buffers"_a = 0, "threads"_a = 0, "lock_for"_a = "cpu", "gpu"_a = 0,
             "backend"_a = "auto", "queue_depth"_a = 0, "verify"_a = true)
        .def("register", &add, "size"_a, "home"_a = "host",
             "An object of so many bytes, until open(); objects are numbered from 0.")
        .def(
            "open", [](Store& self) { done([&] { return ferry_store_open(self.ticket()); }); },
            "Takes the memory and the files. Objects in host memory are zero, those on NVMe are to "
            "be overwritten first.")
        .def("acquire", &acquire, "object"_a, "access"_a = "read",
             "Waits for storage where the bytes are not there yet. access: \"read\", \"write\" or "
             "\"overwrite\".")
        .def(
            "prefetch",
            [](Store& self, const std::vector<uint32_t>& objects) {
                done([&] {
                    return ferry_store_prefetch(self.ticket(), objects.data(), objects.size());
                });
            },
            "objects"_a, "A hint: what is likely to be leased soon, the first first. Never waits.")
        .def(
            "flush", [](Store& self) { done([&] { return ferry_store_flush(self.ticket()); }); },
            "Writes all that was changed, but for what is leased for writing, and waits for it.")
        .def(
            "check", [](Store& self) { done([&] { return ferry_store_check(self.ticket()); }); },
            "Raises the first failed write that was neither overwritten nor reverted.")
        .def(
            "revert",
            [](Store& self, uint32_t object) {
                done([&] { return ferry_store_revert(self.ticket(), object); });
            },
            "object"_a, "After a failed write: the object has the contents before again.")
        .def("stats",
             [](Store& self) {
                 auto stats = sized<ferry_store_stats>();
                 done([&] { return ferry_store_get_stats(self.ticket(), &stats); });
                 return stats;
             })
        .def(
            "close", [](Store& self) { close_unused(self.handle); },
            "Objects end with their store. Refused while leases or arrays use it.")
        .def("__enter__", [](nb::object self) { return self; })
        .def("__exit__", [](Store& self, const nb::args&) { close_unused(self.handle); });
}

}  // namespace ferry::python
