// A process of a test's own: for what ends a process, or changes it for good.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>

namespace ferry {

// Runs `work` in a child and returns waitpid's status. The child ends with what `work` returns, or
// with 99 and the exception's words on standard error.
template <class Work>
int in_child(Work work) {
    fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
        try {
            _exit(work());
        } catch (const std::exception& error) {
            fprintf(stderr, "child: %s\n", error.what());
            _exit(99);
        }
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

}  // namespace ferry
