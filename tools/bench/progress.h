// Says on standard error how far a measurement is: a line that is overwritten on a terminal, a line
// every few seconds otherwise.
#pragma once

#include <chrono>
#include <string>

namespace ferry::tools {

class Progress {
public:
    explicit Progress(int total);
    ~Progress();
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;
    // `done` of the total are done; `text` says what comes, or what came out.
    void show(int done, const std::string& text);
    // Before something that may write lines of its own, as a volume does when it is opened.
    void clear();

private:
    using Clock = std::chrono::steady_clock;
    int total_;
    bool terminal_, shown_ = false;
    Clock::time_point begin_, last_;
};

}  // namespace ferry::tools
