// Bugs as exceptions, for the C ABI: it must not end the program that calls it.
#pragma once

#include <stdexcept>

namespace ferry {

// Not an Error: nobody between a bug and the C ABI handles it.
class Bug : public std::logic_error {
public:
    using std::logic_error::logic_error;
};

// While one lives, bug() throws a Bug on this thread instead of ending the process. Through a
// function that must not throw, a destructor for instance, the process ends all the same.
class BugsThrow {
public:
    BugsThrow() noexcept;
    ~BugsThrow();
    BugsThrow(const BugsThrow&) = delete;
    BugsThrow& operator=(const BugsThrow&) = delete;
};

}  // namespace ferry
