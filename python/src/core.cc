#include "core.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <thread>

namespace ferry::python {

// ---------------------------------------------------------------- errors

void raise(ferry_status status, const std::string& text) {
    const nb::object error = nb::module_::import_("ferry_offload.errors")
                                 .attr("error_of")(status, ferry_status_name(status), text);
    PyErr_SetObject(error.type().ptr(), error.ptr());
    throw nb::python_error();
}

void refuse(const std::string& what, const std::string& measured, const std::string& limit) {
    raise(FERRY_USAGE, what + "\n  measured: " + measured + "\n  limit:    " + limit);
}

// ---------------------------------------------------------------- the end of the interpreter

namespace {

struct End {
    End() {
        pthread_atfork(nullptr, nullptr, [] { get().returning = get().visiting = 0; });
    }
    // Of threads that the child of a fork has not got.
    std::atomic<int> returning = 0;  // that have not seen that it is over and wait for the GIL
    std::atomic<int> visiting = 0;   // that are in a callback, or about to be
    std::atomic<bool> is_over = false, is_gone = false;
    std::thread::id keeper{};  // who ends the interpreter
    static End& get() {
        static End* const kEnd = new End;  // threads may stay in calls until the process ends
        return *kEnd;
    }
};

thread_local int t_visits = 0;  // callbacks that this thread is within

void wait_until_none_are(const std::atomic<int>& threads) {
    while (threads > 0) {
        PyThreadState* const state = PyEval_SaveThread();
        std::this_thread::yield();
        PyEval_RestoreThread(state);
    }
}

// From now on no thread but this one comes back, nor those in callbacks: calls that close_all()
// waits for wait for these.
void keep_others_out() {
    End& end = End::get();
    end.keeper = std::this_thread::get_id();
    end.is_over = true;
    wait_until_none_are(end.returning);
}

// From now on no callback comes: what calls them, an engine that is being made, is not closed.
void keep_callbacks_out() {
    End& end = End::get();
    end.is_gone = true;
    wait_until_none_are(end.visiting);
}

}  // namespace

void OthersRun::come_back(PyThreadState* state) noexcept {
    End& end = End::get();
    ++end.returning;
    if (end.is_over && t_visits == 0 && end.keeper != std::this_thread::get_id()) {
        --end.returning;
        for (;;) ::pause();
    }
    PyEval_RestoreThread(state);
    --end.returning;
}

InPython::InPython() noexcept {
    End& end = End::get();
    ++end.visiting;
    ++t_visits;
    if (!end.is_gone) gil_.emplace();
}

InPython::~InPython() {
    gil_.reset();
    --t_visits;
    --End::get().visiting;
}

// ---------------------------------------------------------------- handles

namespace {

struct Registry {
    std::mutex mutex{};
    std::set<Closable*> open{};
    static Registry& get() {
        static Registry* const kRegistry = new Registry;  // handles may outlive static objects
        return *kRegistry;
    }
};

}  // namespace

Closable::Closable() {
    const std::lock_guard lock(Registry::get().mutex);
    Registry::get().open.insert(this);
}

Closable::~Closable() {
    const std::lock_guard lock(Registry::get().mutex);
    Registry::get().open.erase(this);
}

void close_all() noexcept {
    keep_others_out();
    std::set<const Closable*> seen;
    const auto next = [&]() -> Closable* {
        const std::lock_guard lock(Registry::get().mutex);
        for (Closable* one : Registry::get().open)
            if (seen.insert(one).second) return one;
        return nullptr;
    };
    while (Closable* const one = next()) one->close_at_exit();
    keep_callbacks_out();
}

// ---------------------------------------------------------------- arguments

int32_t choice(const char* name, const std::string& word, const std::vector<std::string>& words) {
    const auto found = std::find(words.begin(), words.end(), word);
    if (found != words.end()) return static_cast<int32_t>(found - words.begin());
    std::string list;
    for (const std::string& one : words) list += (list.empty() ? "\"" : ", \"") + one + "\"";
    refuse(std::string("unknown ") + name, "\"" + word + "\"", list);
}

int64_t bytes_of(nb::handle size) {
    return nb::cast<int64_t>(nb::module_::import_("ferry_offload.sizes").attr("to_bytes")(size));
}

const std::string& whole_text(const char* name, const std::string& text) {
    if (const size_t at = text.find('\0'); at != std::string::npos)
        refuse(std::string(name) + " holds a NUL byte", "at " + std::to_string(at),
               "text without one");
    return text;
}

std::string path_in(nb::handle given) {
    const auto encoded = nb::cast<nb::bytes>(nb::module_::import_("os").attr("fsencode")(given));
    std::string path(encoded.c_str(), encoded.size());
    if (path.empty()) refuse("a path is empty", "\"\"", "the name of a file or directory");
    return whole_text("a path", path);
}

Paths::Paths(nb::handle given) {
    if (given.is_none()) return;
    if (nb::isinstance<nb::str>(given) || nb::hasattr(given, "__fspath__"))
        refuse("paths is one path", nb::cast<std::string>(nb::repr(given)), "a list of paths");
    for (const nb::handle one : given)
        texts.push_back(nb::isinstance<Path>(one) ? nb::cast<Path>(one)
                                                  : Path{.path = path_in(one)});
    for (const Path& text : texts) {
        auto path = sized<ferry_path>();
        path.path = text.path.c_str();
        path.size_bytes = text.size_bytes;
        path.bytes_per_s = text.bytes_per_s;
        path.endurance_tbw = text.endurance_tbw;
        path.raw_device = text.raw_device;
        list.push_back(path);
    }
}

namespace {

std::string text_of(const nb::dlpack::dtype& type) {
    const char* const kind =
        type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)  ? "float"
        : type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int)  ? "int"
        : type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) ? "uint"
                                                                          : "type ";
    return kind + std::to_string(type.bits);
}

bool is_contiguous(const nb::ndarray<nb::ro>& array) {
    if (array.size() == 0) return true;
    int64_t expected = 1;
    for (size_t i = array.ndim(); i-- > 0;) {
        if (array.shape(i) != 1 && array.stride(i) != expected) return false;
        expected *= static_cast<int64_t>(array.shape(i));
    }
    return true;
}

}  // namespace

Array bytes_in(const char* name, nb::handle given, Use use, Where where) {
    const bool on_cpu = where == Where::cpu;
    Array array;
    nb::ndarray<> writable;
    const bool may_write = use == Use::writes && nb::try_cast(given, writable);
    if (may_write) {
        array.keep = nb::ndarray<nb::ro>(writable);
    } else if (PyErr_Clear(); !nb::try_cast(given, array.keep)) {
        PyErr_Clear();
        refuse(std::string(name) + " is no array", nb::cast<std::string>(nb::repr(given.type())),
               on_cpu ? "what has the buffer protocol or DLPack, on the CPU, detached from autograd"
                      : "what has DLPack, on a GPU, detached from autograd");
    }
    if (use == Use::writes && !may_write)
        refuse(std::string(name) + " cannot be written", "a read-only array", "a writable one");
    if (array.keep.device_type() != (on_cpu ? nb::device::cpu::value : nb::device::cuda::value))
        refuse(std::string(name) + " is not on " + (on_cpu ? "the CPU" : "a GPU"),
               "DLPack device " + std::to_string(array.keep.device_type()),
               on_cpu ? "arrays on the CPU" : "arrays on a GPU of CUDA's");
    if (!is_contiguous(array.keep))
        refuse(std::string(name) + " is not contiguous", "strides with gaps or in another order",
               "a contiguous array");
    array.data = const_cast<void*>(static_cast<const void*>(array.keep.data()));
    array.count = static_cast<int64_t>(array.keep.size());
    array.bytes = static_cast<int64_t>(array.keep.nbytes());
    return array;
}

namespace {

constexpr int32_t kNoType = -1;
int32_t type_of(const nb::dlpack::dtype& type) {
    const auto is = [&](nb::dlpack::dtype_code code, int bits) {
        return type.code == static_cast<uint8_t>(code) && type.bits == bits;
    };
    if (is(nb::dlpack::dtype_code::Float, 32)) return FERRY_F32;
    if (is(nb::dlpack::dtype_code::Float, 16)) return FERRY_F16;
    if (is(nb::dlpack::dtype_code::Bfloat, 16) || is(nb::dlpack::dtype_code::UInt, 16))
        return FERRY_BF16;
    return is(nb::dlpack::dtype_code::UInt, 8) ? int32_t{FERRY_INT8} : kNoType;
}

Array typed_in(const char* name, nb::handle given, Use use, Where where, bool codes) {
    if (given.is_none()) return {};
    Array array = bytes_in(name, given, use, where);
    array.type = type_of(array.keep.dtype());
    if (array.type != kNoType && (codes || array.type != FERRY_INT8)) return array;
    const std::string types = "float32, float16, bfloat16, or uint16 as bfloat16's bits";
    refuse(std::string(name) + " has a type that no update knows", text_of(array.keep.dtype()),
           types + (codes ? ", or uint8 as codes" : ""));
}

}  // namespace

Array floats_in(const char* name, nb::handle given, Use use, Where where) {
    return typed_in(name, given, use, where, false);
}

Array moments_in(const char* name, nb::handle given, Use use, Where where) {
    return typed_in(name, given, use, where, true);
}

std::string shown(nb::handle object) {
    return nb::cast<std::string>(nb::module_::import_("ferry_offload.sizes").attr("shown")(object));
}

}  // namespace ferry::python

NB_MODULE(_core, module) {
    using namespace ferry::python;
    nb::set_leak_warnings(false);  // what lives until the end is closed by close_all()
    module.doc() = "ferry's C ABI for Python; ferry_offload is what a program imports.";
    module.def("version", &ferry_version, "Of the library: \"0.1.0\".");
    module.def("abi_version", &ferry_abi_version);
    module.def(
        "log_to_stderr",
        [](const std::string& level) {
            const int32_t least = choice("level", level, {"debug", "info", "warn", "bug"});
            done([&] { return ferry_log_to_stderr(least); });
        },
        "level"_a = "info",
        "Messages of this level and above go to standard error; at first none do.");
    module.def(
        "close_all", &close_all,
        "Closes every handle: at the end of the interpreter, to which calls of other threads do "
        "not come back any more.");
    nb::class_<Path>(module, "Path", "A directory or raw device that state may lie on.")
        .def(
            "__init__",
            [](Path* self, nb::handle path, nb::handle size, double bytes_per_s,
               double endurance_tbw, bool raw_device) {
                new (self)
                    Path{path_in(path), bytes_of(size), bytes_per_s, endurance_tbw, raw_device};
            },
            "path"_a, "size"_a = 0, "bytes_per_s"_a = 0.0, "endurance_tbw"_a = 0.0,
            "raw_device"_a = false)
        .def_ro("path", &Path::path)
        .def_ro("size_bytes", &Path::size_bytes)
        .def_ro("bytes_per_s", &Path::bytes_per_s)
        .def_ro("endurance_tbw", &Path::endurance_tbw)
        .def_ro("raw_device", &Path::raw_device)
        .def("__repr__", &shown);
    bind_memory(module);
    bind_transfer(module);
    bind_aio(module);
    bind_files(module);
    bind_pool(module);
    bind_store(module);
    bind_optim(module);
    bind_engine(module);
}
