// The standard streams of a program that opens files.
#pragma once

namespace ferry {

// Points standard input, output and error at /dev/null where they are closed. Else the next file
// that is opened takes such a number, and what is printed goes into it. The first call of main().
void hold_standard_streams() noexcept;

}  // namespace ferry
