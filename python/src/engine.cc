// The engine of `ferry train`, step by step.
#include "core.h"

namespace ferry::python {
namespace {

using EngineHandle = Handle<ferry_engine, ferry_engine_destroy>;

std::unique_ptr<EngineHandle> create(nb::handle config, const std::vector<std::string>& overrides,
                                     bool resume, nb::handle checkpoint) {
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
    auto options = sized<ferry_engine_options>();
    options.config_json = json.empty() ? nullptr : json.c_str();
    options.config_file = file.empty() ? nullptr : file.c_str();
    options.overrides = texts.data();
    options.override_count = texts.size();
    options.resume = resume;
    options.checkpoint = from.empty() ? nullptr : from.c_str();
    auto made = std::make_unique<EngineHandle>();
    done([&] { return ferry_engine_create(&options, &made->ticket); });
    return made;
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
        done([&] { return kCall(self.ticket, &report); });
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
}

}  // namespace

void bind_engine(nb::module_& module) {
    bind_reports(module);
    nb::class_<EngineHandle>(module, "Engine",
                             "A run of `ferry train`: plans, reserves everything and fills the "
                             "state over the tiers.")
        .def(nb::new_(&create), "config"_a, "overrides"_a = std::vector<std::string>{},
             "resume"_a = false, "checkpoint"_a = nb::none(),
             "config: a dict (docs/configuration.md) or a path. overrides: \"key.path=value\". "
             "checkpoint: one that save() or `ferry train` wrote, to go on from.")
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
