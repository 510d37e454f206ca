// bench_adam [--json] [--millions N] [--pairs N] [--threads N]... [--all]
// The optimizer's speed beside a hand-written loop, ns an element; --all adds every method, type
// and SIMD target.
#include <cstdio>
#include <cstring>

#include "adam_core.h"

int main(int argc, char** argv) {
    using namespace ferry;
    bench::AdamBench what;
    bool json = false;
    std::string command = "bench_adam";
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        command += " " + word;
        const auto value = [&] {
            if (i + 1 < argc) command += std::string(" ") + argv[i + 1];
            return i + 1 < argc ? std::atoi(argv[++i]) : 0;
        };
        if (word == "--json")
            json = true;
        else if (word == "--millions")
            what.count = int64_t{value()} << 20;
        else if (word == "--pairs")
            what.pairs = value();
        else if (word == "--threads")
            what.threads.push_back(value());
        else if (word == "--all") {
            what.gradient_types.push_back(DType::f16);
            what.methods = {optim::Method::adam, optim::Method::sgd, optim::Method::lion,
                            optim::Method::adagrad};
            what.targets = optim::supported_targets();
        } else {
            std::fprintf(stderr, "bench_adam: unknown argument %s\n", word.c_str());
            return 2;
        }
    }
    if (what.count < 1 || what.pairs < 1) {
        std::fprintf(stderr, "bench_adam: --millions and --pairs need a number of 1 or more\n");
        return 2;
    }
    const auto rows = bench::measure_adam(what);
    std::fputs((json ? bench::to_json(rows, command) : bench::to_table(rows)).c_str(), stdout);
    return 0;
}
