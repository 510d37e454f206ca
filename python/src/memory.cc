// Memory of ferry's as Python sees it.
#include "core.h"

namespace ferry::python {
namespace {

// The owner that an array of it holds on to: the memory outlives a lease that is given back before.
nb::object keeper_of(nb::handle self) {
    const Memory& memory = *nb::inst_ptr<Memory>(self);
    if (!memory.owner)
        refuse("the lease was released", "its bytes are the store's again", "a lease that is held");
    Memory kept(memory);
    if (!kept.lease.is_valid()) kept.lease = nb::borrow(self);
    return nb::cast(std::move(kept));
}

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    view->obj = nullptr;
    try {
        Memory& memory = *nb::inst_ptr<Memory>(self);
        const nb::object keeper = keeper_of(self);
        memory.exported = true;
        return PyBuffer_FillInfo(view, keeper.ptr(), memory.data, memory.bytes, memory.read_only,
                                 flags);
    } catch (nb::python_error& error) {
        error.restore();
        return -1;
    }
}

// There is none to do, but numpy keeps a buffer only of what has this.
void release_buffer(PyObject*, Py_buffer*) {}

PyType_Slot kSlots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&get_buffer)},
                        {Py_bf_releasebuffer, reinterpret_cast<void*>(&release_buffer)},
                        {0, nullptr}};

nb::object array_of(nb::handle self) {
    const Memory& memory = *nb::inst_ptr<Memory>(self);
    const nb::object keeper = keeper_of(self);
    const auto count = static_cast<size_t>(memory.bytes);
    if (memory.read_only)
        return nb::cast(nb::ndarray<nb::array_api, const uint8_t, nb::device::cpu>(
            memory.data, {count}, keeper));
    return nb::cast(
        nb::ndarray<nb::array_api, uint8_t, nb::device::cpu>(memory.data, {count}, keeper));
}

}  // namespace

void bind_memory(nb::module_& module) {
    nb::class_<Memory>(module, "Memory", nb::type_slots(kSlots),
                       "Bytes of ferry's, by the buffer protocol (numpy, torch.frombuffer) and "
                       "DLPack, without a copy. They live as long as anybody uses them.")
        .def_prop_ro("nbytes", [](const Memory& memory) { return memory.bytes; })
        .def_prop_ro("readonly", [](const Memory& memory) { return memory.read_only; })
        .def("__len__", [](const Memory& memory) { return memory.bytes; })
        .def("__dlpack__",
             [](nb::handle self, const nb::kwargs& options) {
                 return array_of(self).attr("__dlpack__")(**options);
             })
        .def("__dlpack_device__", [](const Memory&) { return nb::make_tuple(1, 0); })
        .def(
            "numpy",
            [](nb::handle self, nb::handle dtype) {
                return nb::module_::import_("numpy").attr("frombuffer")(keeper_of(self), dtype);
            },
            "dtype"_a = "uint8",
            nb::sig("def numpy(self, dtype: typing.Any = 'uint8') -> typing.Any"),
            "A numpy array of these bytes.");
}

}  // namespace ferry::python
