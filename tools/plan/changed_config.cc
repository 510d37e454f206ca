#include "changed_config.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/log.h"
#include "ferry/optim.h"

namespace ferry::tools {

Changed with_keys(const PlanOptions& options, const std::vector<std::string>& more) {
    static constexpr LogSink kNowhere{.line = [](LogLevel, Warning, std::string_view) {}};
    std::vector<std::string> keys = more;
    if (!options.gpu.empty()) keys.emplace_back("device=cuda");
    const auto names = [](const std::string& one, const std::string& other) {
        return one.substr(0, one.find('=')) == other.substr(0, other.find('='));
    };
    for (const std::string& given : options.overrides.keys) {
        if (std::ranges::none_of(keys, [&](const std::string& one) { return names(one, given); }))
            keys.push_back(given);
    }
    set_log_sink(&kNowhere);
    Changed changed;
    try {
        changed.config = load_config(options.config, keys);
    } catch (const Error& error) {
        changed.why = error.problem().what;
    }
    set_log_sink(nullptr);
    return changed;
}

std::vector<OtherOptimizer> others_of(const PlanOptions& options, const Config& config) {
    using optim::Method;
    const Method method = config.optimizer.method;
    if (method != Method::adamw && method != Method::adam) return {};
    const int64_t freeze = std::max<int64_t>(
        1, std::min(std::max(config.schedule.warmup_steps, config.steps / 5), config.steps - 1));
    std::vector<OtherOptimizer> others;
    for (const auto& [other, key] :
         {std::pair{Method::onebit_adam, "optimizer.freeze_step"},
          std::pair{Method::zeroone_adam, "optimizer.var_freeze_step"}}) {
        Changed changed =
            with_keys(options, {fmt::format("optimizer.method={}", optim::name_of(other)),
                                fmt::format("{}={}", key, freeze), "zero.compress.gradients=none"});
        others.push_back({.method = other, .config = changed.config, .why = changed.why});
    }
    return others;
}

Config config_to_divide(const PlanOptions& options) {
    static std::vector<std::string> warnings;
    static constexpr LogSink kKept{
        .line = [](LogLevel level, Warning about, std::string_view line) {
            if (level == LogLevel::warn && about != Warning::idle_with_one_stage)
                warnings.emplace_back(line);
        }};
    const auto load = [&] {
        return options.overrides.checked(load_config(options.config, options.overrides.keys));
    };
    const std::vector<std::string> given = given_keys(options.config, options.overrides.keys);
    if (std::ranges::find(given, "parallel.pipeline") != given.end()) return load();
    set_log_sink(&kKept);
    std::exception_ptr failed;
    Config config;
    try {
        config = load();
    } catch (...) {
        failed = std::current_exception();
    }
    set_log_sink(nullptr);
    for (const std::string& line : warnings) log_warn(line);
    if (failed) std::rethrow_exception(failed);
    return config;
}

}  // namespace ferry::tools
