// The engine of `ferry train`, step by step.
#include "core.h"

#include <algorithm>
#include <exception>

namespace ferry::python {
namespace {

class EngineHandle : public Handle<ferry_engine, ferry_engine_destroy> {
public:
    EngineHandle() = default;
    ~EngineHandle() override { close_quietly(); }  // before the callables go
    nb::object load{}, progress{};                 // of the program's; invalid: none
};

// A callable leads as a rule to whoever holds the engine.
int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    const EngineHandle& engine = *nb::inst_ptr<EngineHandle>(self);
    Py_VISIT(engine.load.ptr());
    Py_VISIT(engine.progress.ptr());
    return 0;
}
int clear(PyObject* self) {
    if (!nb::inst_ready(self)) return 0;
    EngineHandle& engine = *nb::inst_ptr<EngineHandle>(self);
    const nb::object load = std::move(engine.load), progress = std::move(engine.progress);
    return 0;
}
PyType_Slot kSlots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                        {Py_tp_clear, reinterpret_cast<void*>(&clear)},
                        {0, nullptr}};

// What load raised within a call of this thread, on which it runs.
thread_local std::exception_ptr failure_of_load;

// ---------------------------------------------------------------- batches

struct Batch {
    std::vector<int32_t> tokens{}, targets{};
    int64_t sequences = 0, sequence = 0;
};

template <class Number>
void copy_numbers(const char* name, const Array& from, std::vector<int32_t>& to) {
    const auto* numbers = static_cast<const Number*>(from.data);
    for (int64_t i = 0; i < from.count; ++i) {
        to[static_cast<size_t>(i)] = static_cast<int32_t>(numbers[i]);
        if (static_cast<Number>(to[static_cast<size_t>(i)]) != numbers[i])
            refuse(std::string(name) + " has a number that is no token", std::to_string(numbers[i]),
                   "numbers of 32 bits");
    }
}

// Rows of token ids, as numpy and torch have them.
std::vector<int32_t> numbers_in(const char* name, nb::handle given, int64_t& rows,
                                int64_t& columns) {
    const Array array = bytes_in(name, given, Use::reads);
    if (array.keep.ndim() != 2)
        refuse(std::string(name) + " has no rows",
               std::to_string(array.keep.ndim()) + " dimensions", "2: sequences and tokens");
    rows = static_cast<int64_t>(array.keep.shape(0));
    columns = static_cast<int64_t>(array.keep.shape(1));
    std::vector<int32_t> numbers(static_cast<size_t>(array.count));
    const nb::dlpack::dtype type = array.keep.dtype();
    const bool is_signed = type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int);
    const bool is_unsigned = type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt);
    if (is_signed && type.bits == 32)
        copy_numbers<int32_t>(name, array, numbers);
    else if (is_signed && type.bits == 64)
        copy_numbers<int64_t>(name, array, numbers);
    else if (is_unsigned && type.bits == 16)
        copy_numbers<uint16_t>(name, array, numbers);
    else
        refuse(std::string(name) + " has another type than token ids have",
               "DLPack type " + std::to_string(type.code) + " of " + std::to_string(type.bits) +
                   " bits",
               "int32, int64 or uint16");
    return numbers;
}

// Without targets each row has a token more: what follows is the target.
Batch batch_in(nb::handle tokens, nb::handle targets) {
    Batch batch;
    int64_t columns = 0;
    std::vector<int32_t> given = numbers_in("tokens", tokens, batch.sequences, columns);
    if (!targets.is_none()) {
        int64_t rows = 0, others = 0;
        batch.sequence = columns;
        batch.tokens = std::move(given);
        batch.targets = numbers_in("targets", targets, rows, others);
        if (rows != batch.sequences || others != columns)
            refuse("targets has another shape than tokens",
                   std::to_string(rows) + " x " + std::to_string(others),
                   std::to_string(batch.sequences) + " x " + std::to_string(columns));
        return batch;
    }
    batch.sequence = std::max<int64_t>(columns - 1, 0);
    for (int64_t row = 0; row < batch.sequences && columns > 0; ++row) {
        const auto first = given.begin() + row * columns;
        batch.tokens.insert(batch.tokens.end(), first, first + batch.sequence);
        batch.targets.insert(batch.targets.end(), first + 1, first + columns);
    }
    return batch;
}

// ---------------------------------------------------------------- the program's callables

int64_t write_batch(EngineHandle& self, int64_t step, int64_t sequences, int64_t sequence,
                    int32_t* tokens, int32_t* targets) {
    if (!self.load)
        refuse("the engine is being collected", "its load callable is gone", "an engine in use");
    const nb::object given = nb::object(self.load)(step);
    const bool pair = nb::isinstance<nb::tuple>(given) && nb::len(given) == 2;
    const Batch batch = pair ? batch_in(given[0], given[1]) : batch_in(given, nb::none());
    if (batch.sequences != sequences || batch.sequence != sequence)
        refuse("load gave a batch of another shape",
               std::to_string(batch.sequences) + " sequences of " + std::to_string(batch.sequence) +
                   " tokens",
               std::to_string(sequences) + " of " + std::to_string(sequence));
    std::copy(batch.tokens.begin(), batch.tokens.end(), tokens);
    std::copy(batch.targets.begin(), batch.targets.end(), targets);
    return sequences;
}

// What it raises comes out of the call that it is within.
int64_t load_batch(void* context, int64_t step, int64_t sequences, int64_t sequence,
                   int32_t* tokens, int32_t* targets) noexcept {
    const InPython in_python;
    if (!in_python) return -1;
    auto& self = *static_cast<EngineHandle*>(context);
    try {
        return write_batch(self, step, sequences, sequence, tokens, targets);
    } catch (...) {
        failure_of_load = std::current_exception();
        return -1;
    }
}

// On any thread. What it raises is reported as Python reports what nobody can catch.
void tell_progress(void* context, const char* stage, int64_t bytes, int64_t of) noexcept {
    const InPython in_python;
    if (!in_python) return;
    try {
        if (const nb::object tell = static_cast<EngineHandle*>(context)->progress)
            tell(stage, bytes, of);
    } catch (nb::python_error& error) {
        error.discard_as_unraisable("the progress callable of a ferry_offload.Engine");
    }
}

template <class Call>
void done_by(const Call& call) {
    failure_of_load = nullptr;
    try {
        done(call);
    } catch (const nb::python_error&) {
        if (const auto failure = std::exchange(failure_of_load, nullptr))
            std::rethrow_exception(failure);
        throw;
    }
}

std::unique_ptr<EngineHandle> create(nb::handle config, const std::vector<std::string>& overrides,
                                     bool resume, nb::handle checkpoint, bool fed, nb::object load,
                                     nb::object progress) {
    std::string json, file;
    if (nb::isinstance<nb::dict>(config))
        json = nb::cast<std::string>(nb::module_::import_("json").attr("dumps")(config));
    else
        file = path_in(config);
    const std::string from = checkpoint.is_none() ? "" : path_in(checkpoint);
    std::vector<const char*> texts;
    texts.reserve(overrides.size());
    for (const std::string& text : overrides)
        texts.push_back(whole_text("an override", text).c_str());
    auto made = std::make_unique<EngineHandle>();
    auto options = sized<ferry_engine_options>();
    options.config_json = json.empty() ? nullptr : json.c_str();
    options.config_file = file.empty() ? nullptr : file.c_str();
    options.overrides = texts.data();
    options.override_count = texts.size();
    options.resume = resume;
    options.checkpoint = from.empty() ? nullptr : from.c_str();
    options.fed = fed;
    if (!load.is_none()) {
        made->load = std::move(load);
        options.load = &load_batch;
        options.load_context = made.get();
    }
    if (!progress.is_none()) {
        made->progress = std::move(progress);
        options.progress = &tell_progress;
        options.progress_context = made.get();
    }
    done([&] { return ferry_engine_create(&options, &made->ticket); });
    return made;
}

void feed(EngineHandle& self, nb::handle tokens, nb::handle targets, bool evaluation) {
    const Batch batch = batch_in(tokens, targets);
    auto given = sized<ferry_batch>();
    given.tokens = batch.tokens.data();
    given.targets = batch.targets.data();
    given.sequences = batch.sequences;
    given.sequence = batch.sequence;
    given.evaluation = evaluation;
    done([&] { return ferry_engine_feed(self.ticket, &given); });
}

nb::tuple batch_shape(EngineHandle& self, bool evaluation) {
    int64_t sequences = 0, sequence = 0;
    done([&] { return ferry_engine_batch_shape(self.ticket, evaluation, &sequences, &sequence); });
    return nb::make_tuple(sequences, sequence);
}

void bind_reports(nb::module_& module) {
    nb::class_<ferry_step_report>(module, "StepReport")
        .def_ro("step", &ferry_step_report::step)
        .def_ro("loss", &ferry_step_report::loss)
        .def_ro("gradient_norm", &ferry_step_report::gradient_norm)
        .def_ro("clip_factor", &ferry_step_report::clip_factor)
        .def_ro("lr", &ferry_step_report::lr)
        .def_ro("loss_scale", &ferry_step_report::loss_scale)
        .def_ro("seconds", &ferry_step_report::seconds)
        .def_ro("targets", &ferry_step_report::targets)
        .def_ro("tokens", &ferry_step_report::tokens)
        .def_prop_ro("skipped", [](const ferry_step_report& self) { return self.skipped != 0; })
        .def_prop_ro("speculative",
                     [](const ferry_step_report& self) { return self.speculative != 0; })
        .def_prop_ro("committed", [](const ferry_step_report& self) { return self.committed != 0; })
        .def("__repr__", &shown);
    nb::class_<ferry_evaluation>(module, "Evaluation")
        .def_ro("loss", &ferry_evaluation::loss)
        .def_ro("targets", &ferry_evaluation::targets)
        .def("__repr__", &shown);
    nb::class_<ferry_run_report>(module, "RunReport")
        .def_ro("steps", &ferry_run_report::steps)
        .def_ro("tokens", &ferry_run_report::tokens)
        .def_ro("seconds", &ferry_run_report::seconds)
        .def_ro("steps_committed", &ferry_run_report::steps_committed)
        .def_ro("steps_rolled_back", &ferry_run_report::steps_rolled_back)
        .def_ro("clipped_steps", &ferry_run_report::clipped_steps)
        .def_ro("skipped_steps", &ferry_run_report::skipped_steps)
        .def_ro("device_bytes", &ferry_run_report::device_bytes)
        .def_ro("host_bytes", &ferry_run_report::host_bytes)
        .def_ro("nvme_bytes", &ferry_run_report::nvme_bytes)
        .def_ro("nvme_bytes_read", &ferry_run_report::nvme_bytes_read)
        .def_ro("nvme_bytes_written", &ferry_run_report::nvme_bytes_written)
        .def("__repr__", &shown);
}

template <class Report, ferry_status (*kCall)(ferry_engine*, Report*)>
auto reports() {
    return [](EngineHandle& self) {
        auto report = sized<Report>();
        done_by([&] { return kCall(self.ticket, &report); });
        return report;
    };
}
template <class Number, ferry_status (*kCall)(ferry_engine*, Number*)>
auto number() {
    return [](EngineHandle& self) {
        Number value = 0;
        done([&] { return kCall(self.ticket, &value); });
        return value;
    };
}

void save_model(EngineHandle& self, nb::handle directory, const std::string& dtype) {
    const std::string path = path_in(directory);
    const int32_t type = choice("dtype", dtype, {"run", "float32", "bfloat16", "float16"}) - 1;
    done([&] { return ferry_engine_export(self.ticket, path.c_str(), type); });
}

void save(EngineHandle& self, nb::handle directory) {
    const std::string path = path_in(directory);
    done([&] { return ferry_engine_save(self.ticket, path.c_str()); });
}

void close(EngineHandle& self) {
    if (!self.ticket) return;
    done([&] { return ferry_engine_destroy(self.ticket); });
    self.ticket = nullptr;
    self.load.reset();
    self.progress.reset();
}

}  // namespace

void bind_engine(nb::module_& module) {
    bind_reports(module);
    nb::class_<EngineHandle>(module, "Engine", nb::type_slots(kSlots),
                             "A run of `ferry train`: plans, reserves everything and fills the "
                             "state over the tiers.")
        .def(nb::new_(&create), "config"_a, "overrides"_a = std::vector<std::string>{},
             "resume"_a = false, "checkpoint"_a = nb::none(), nb::kw_only(), "fed"_a = false,
             "load"_a = nb::none(), "progress"_a = nb::none(),
             "config: a dict (docs/configuration.md) or a path. overrides: \"key.path=value\". "
             "checkpoint: one that save() or `ferry train` wrote, to go on from. fed: batches come "
             "from feed(), in place of data.tokens. load: they come from load(step), which "
             "returns what feed() takes; step is 0 for evaluate(). progress: called as "
             "progress(stage, bytes, of) in start-up and checkpoints, on any thread.")
        .def("feed", &feed, "tokens"_a, "targets"_a = nb::none(), nb::kw_only(),
             "evaluation"_a = false,
             "The next step's batch, or evaluate()'s. tokens: rows of ids, int32, int64 or uint16, "
             "and targets as many, -1 where nothing is to be predicted. Without targets each row "
             "has one token more.")
        .def("batch_shape", &batch_shape, "evaluation"_a = false,
             "Sequences and tokens of each that a step takes, or an evaluation.")
        .def("step", reports<ferry_step_report, ferry_engine_step>(), "One optimizer step.")
        .def("evaluate", reports<ferry_evaluation, ferry_engine_evaluate>(),
             "Over the held-back micro-batches that the configuration asks for.")
        .def("report", reports<ferry_run_report, ferry_engine_report>(), "Of the steps so far.")
        .def_prop_ro("last_step", number<int64_t, ferry_engine_last_step>())
        .def("state_hash", number<uint64_t, ferry_engine_state_hash>(),
             "The hash of all weights and moments that `ferry train` prints.")
        .def("save", &save, "directory"_a,
             "Writes the whole state as a checkpoint, directory/step-00000100.")
        .def("save_model", &save_model, "directory"_a, "dtype"_a = "run",
             "Writes the model as transformers saves one.")
        .def("close", &close)
        .def("__enter__", [](nb::object self) { return self; })
        .def("__exit__", [](EngineHandle& self, const nb::args&) { close(self); });
}

}  // namespace ferry::python
