// The ranks' output as mpirun --tag-output passes it on: taken apart, put together to whole lines
// again and prefixed with the rank.
#pragma once

#include <array>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ferry::tools {

class RankOutput {
public:
    // Takes what mpirun wrote on stream 1 (standard output) or 2. Whole lines go on to that stream
    // of this program.
    void add(int stream, std::string_view bytes);
    // Prints what has no line end.
    void finish();

    // Why the ranks ended, as far as can be said: "rank 2 failed: ..." by what it printed, or,
    // where those that printed something only say that another was lost, "rank 2 was lost: ...".
    // Empty: no rank printed an error.
    std::string reason() const;

private:
    static constexpr int kMpirun = -1;  // as a rank: mpirun itself
    struct Failure {
        int rank;
        std::string text;
    };

    void take_line(int stream, const std::string& line);
    void say(int rank, int stream, const std::string& line);
    void note_error(int rank, const std::string& line);

    std::array<std::string, 2> unread_{};  // the rest of each of mpirun's streams, without line end
    std::map<std::pair<int, int>, std::string> unfinished_;  // lines of a rank's stream
    std::vector<Failure> failures_;                          // by when they began to be printed
    std::map<int, size_t> printing_;                         // rank: its failure, not ended yet
};

}  // namespace ferry::tools
