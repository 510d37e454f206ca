// Helpers of all pictures: style, colours, frame, axis steps, and the file that they go into.
#pragma once

#include <array>
#include <string>

namespace ferry::tools {

// Distinguishable with any colour vision, on white and on near black (Okabe and Ito).
constexpr std::array<const char*, 6> kColours{"#0072b2", "#e69f00", "#009e73",
                                              "#d55e00", "#cc79a7", "#56b4e9"};

// Up to the picture's content. Readable on light and on dark ground; classes "title", "faint",
// "axis" and "grid". Title and caption begin at `left`. Ends with "</svg>", which is the caller's.
std::string svg_beginning(double width, double height, double left, const std::string& title,
                          const std::string& caption);
std::string svg_escaped(const std::string& text);
// 1, 2 or 5 times a power of ten: at most five of them reach `most`.
double tick_for(double most);

// Before a measurement: as check_writable(), for a file that may hold an older picture of ferry's.
void check_picture_file(const std::string& option, const std::string& file);
void write_picture(const std::string& option, const std::string& file, const std::string& svg);

}  // namespace ferry::tools
