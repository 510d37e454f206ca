#include "transfers.h"

#include <poll.h>

namespace ferry::python {

// One stay without the GIL for all that has ended, and one call for all who await it: each of both
// costs more than a read's share of anything else here.
size_t Transfers::collect_some(int64_t wait_ms) {
    std::vector<Ended> ended;
    ended.reserve(kAtOnce);
    done([&] {
        ferry_status status = FERRY_OK;
        while (status == FERRY_OK && ended.size() < kAtOnce) {
            auto completion = sized<ferry_completion>();
            status = wait(ended.empty() ? wait_ms : 0, &completion);
            if (status != FERRY_OK) break;
            const bool failed =
                completion.status != FERRY_OK && completion.status != FERRY_CANCELLED;
            ended.push_back({completion, failed ? ferry_last_error() : ""});
        }
        return ended.empty() ? status : FERRY_OK;  // the next look meets it again
    });
    Told told;
    for (Ended& one : ended) {
        const auto found = pending_.find(one.completion.tag);
        if (found == pending_.end()) continue;
        const std::shared_ptr<Outcome> outcome = std::move(found->second);
        pending_.erase(found);
        outcome->bytes = one.completion.bytes;
        outcome->seconds = one.completion.seconds;
        finish(*outcome, one.completion.status, std::move(one.why), told);
    }
    told.resolve();
    return ended.size();
}

void Transfers::collect() {
    while (is_open() && collect_some(0) == kAtOnce) {
    }
}

void Transfers::all_are_cancelled(const char* why) {
    Told told;
    for (auto& [tag, outcome] : std::exchange(pending_, {}))
        finish(*outcome, FERRY_CANCELLED, why, told);
    told.resolve();
}

int32_t Transfers::priority_of(const std::string& word) {
    static const std::vector<std::string> kPriorities{"normal", "urgent", "background"};
    return choice("priority", word, kPriorities);
}

void Transfers::finish(Outcome& outcome, ferry_status status, std::string why, Told& told) {
    outcome.status = status;
    outcome.why = status == FERRY_CANCELLED && why.empty()
                      ? "ferry_aio_cancel: the transfer was cancelled before it began"
                      : std::move(why);
    outcome.done = true;
    told.buffers.push_back(std::exchange(outcome.buffer, {}));
    for (nb::object& future : outcome.futures) told.futures.push_back(std::move(future));
    outcome.futures.clear();
}

void Transfers::Told::resolve() {
    if (futures.empty()) return;
    try {
        nb::list list;
        for (const nb::object& future : futures) list.append(future);
        nb::module_::import_("ferry_offload.waiting").attr("resolve")(list);
    } catch (nb::python_error& error) {
        error.discard_as_unraisable("an awaited transfer of ferry_offload's");
    }
}

bool Transfer::is_done() const {
    while (!outcome->done && of->collect_one(0)) {
    }
    return outcome->done;
}

int64_t Transfer::result() const {
    if (outcome->status != FERRY_OK) raise(outcome->status, outcome->why);
    return outcome->bytes;
}

// Not in the C ABI's wait, which keeps the handle from threads that would submit more. Another
// thread may collect this one: it is looked at again soon.
int64_t Transfer::wait() const {
    constexpr int kLookAgainMs = 2;
    while (!is_done()) {
        pollfd asked{.fd = of->descriptor(), .events = POLLIN, .revents = 0};
        const OthersRun others_run;
        ::poll(&asked, 1, kLookAgainMs);
    }
    return result();
}

void bind_transfer(nb::module_& module) {
    nb::class_<Transfer>(module, "Transfer",
                         "A read or write under way: wait() for it, or await it in asyncio.")
        .def("done", &Transfer::is_done, "Whether it has ended. Never waits.")
        .def("wait", &Transfer::wait, "The bytes moved; raises what went wrong.")
        .def("result", &Transfer::result, "As wait(), of one that is done.")
        .def_prop_ro("seconds", [](const Transfer& self) { return self.outcome->seconds; })
        .def_prop_ro("_of", [](const Transfer& self) { return self.of->number; })
        .def("_fileno", [](const Transfer& self) { return self.of->descriptor(); })
        .def("_collect", [](const Transfer& self) { self.of->collect(); })
        .def(
            "_tell",
            [](const Transfer& self, nb::object future) {
                if (self.outcome->done) return false;
                self.outcome->futures.push_back(std::move(future));
                return true;
            },
            "future"_a, "Sets it when the transfer has ended. False: it has.")
        .def(
            "_forget",
            [](const Transfer& self, nb::handle future) {
                std::erase_if(self.outcome->futures,
                              [&](const nb::object& one) { return one.is(future); });
            },
            "future"_a, "As if it had never been told.")
        .def(
            "__await__",
            [](nb::handle self) {
                return nb::module_::import_("ferry_offload.waiting").attr("of")(self);
            },
            nb::sig("def __await__(self) -> typing.Generator[typing.Any, None, int]"));
}

}  // namespace ferry::python
