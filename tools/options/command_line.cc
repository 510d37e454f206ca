#include "command_line.h"

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string_view>

#include "base/text.h"
#include "base/words.h"

namespace ferry::tools {
namespace {

bool is_override(const std::string& word) {
    std::error_code reason;
    return !word.starts_with("-") && word.find('=') != std::string::npos &&
           !std::filesystem::exists(word, reason);
}

std::vector<std::string> names_of_commands(const CLI::App& app) {
    std::vector<std::string> names;
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
        names.push_back(command->get_name());
    return names;
}

std::vector<std::string> names_of_options(const CLI::App& app) {
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options()) {
        for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
    return names;
}

// The first word that this command does not know, and the nearest that it does, or that the command
// above it, `parent`, knows: that one's options stand before the command's name.
std::string suggestion_in(const CLI::App& app, const CLI::App* parent = nullptr) {
    for (std::string word : app.remaining()) {
        const bool option = word.starts_with("-");
        if (option) word.resize(std::min(word.find('='), word.size()));
        std::string place,
            near = nearest_word(word, option ? names_of_options(app) : names_of_commands(app));
        if (near.empty() && option && parent != nullptr) {
            near = nearest_word(word, names_of_options(*parent));
            place = ", before " + app.get_name();
        }
        if (!near.empty())
            return in_quotes(word) + ": did you mean " + in_quotes(near) + place + "? ";
    }
    return {};
}

}  // namespace

std::vector<std::string> words_of(int count, const char* const* words) {
    std::vector<std::string> all;
    bool behind_set = false;  // a key and its value stand just before
    for (int i = 1; i < count; ++i) {
        const std::string word = words[i];
        if (word == "--") {
            all.insert(all.end(), words + i, words + count);
            break;
        }
        // It may stand alone, which is not the same as an empty name.
        const bool behind_resume = !all.empty() && all.back() == "--resume";
        if (word == "--resume=" || (behind_resume && word.empty()))
            throw Error(Trouble::usage, {.what = "the name of a checkpoint is empty",
                                         .where = "--resume",
                                         .remedy = "leave it out, or say what it is"});
        if (behind_set && is_override(word)) all.emplace_back("--set");
        behind_set = word.starts_with("--set=") || (behind_set && is_override(word)) ||
                     (!all.empty() && all.back() == "--set");
        all.push_back(word);
    }
    return all;
}

void refuse_empty(CLI::App& app) {
    for (CLI::Option* option : app.get_options()) {
        if (option->get_items_expected_max() == 0) continue;  // a flag
        option->check(CLI::Validator(
            [](std::string& text) {
                return text.empty() ? std::string("it is empty; leave it out, or say what it is")
                                    : std::string();
            },
            ""));
    }
    for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
        refuse_empty(*command);
}

namespace {

// The word where a command was asked for; empty: there was none.
std::string unknown_command(const CLI::App& app) {
    const CLI::App* at = &app;
    while (!at->get_subcommands().empty()) at = at->get_subcommands().front();
    const std::vector<std::string> words = at->remaining();
    const bool has_commands = !at->get_subcommands([](const CLI::App*) { return true; }).empty();
    if (!has_commands || words.empty()) return {};
    return in_quotes(shown(words.front(), 100)) + " is none";
}

}  // namespace

Error usage_error(const CLI::App& app, const CLI::ParseError& error) {
    constexpr size_t kLongest = 600;
    std::string command = "ferry", near = suggestion_in(app);
    for (const CLI::App* at = &app; !at->get_subcommands().empty();) {
        const CLI::App* const parent = at;
        at = at->get_subcommands().front();
        command += " " + at->get_name();
        if (near.empty()) near = suggestion_in(*at, parent);
    }
    return {Trouble::usage,
            {.what = shown(error.what(), kLongest),
             .where = command,
             .measured = unknown_command(app),
             .remedy = near + command + " --help"}};
}

}  // namespace ferry::tools
