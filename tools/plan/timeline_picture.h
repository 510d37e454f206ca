// A predicted step as a picture: a row for each lane, one step from left to right. What a step
// leaves to the next one stands at the left, where the step before left it.
#pragma once

#include <string>
#include <vector>

#include "train/prediction/predictor.h"

namespace ferry::tools {

// Tasks of the same kind that follow each other closely, as one.
struct Bar {
    swap::Lane lane = swap::Lane::compute;
    std::string name{};
    double begin_s = 0, end_s = 0;  // in [0, the step]
    double busy_s = 0;
    int64_t tasks = 0, bytes = 0;
};
// `gap` of the step between two tasks does not separate them.
std::vector<Bar> bars_of(const swap::Schedule& step, const swap::Timeline& timeline, double gap);
std::vector<Bar> bars_of(const train::Prediction& prediction, double gap);

// The picture in a terminal: letters where kernels run, shades where bytes move; with its legend.
std::string timeline_text(const train::Prediction& prediction);
// Any lanes over so many seconds.
std::string bars_svg(const std::vector<Bar>& bars, double seconds, const std::string& title,
                     const std::string& caption);
// Of a pipeline what each stage computes, and what it exchanges.
std::string timeline_svg(const train::Prediction& prediction, const std::string& caption);

}  // namespace ferry::tools
