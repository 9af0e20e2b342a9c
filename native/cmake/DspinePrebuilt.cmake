# Packages a finished build tree: `make setup` builds once and the wheel takes seconds.
# The tree's own install rules run, so there is one list of what is installed.

if(NOT EXISTS "${DSPINE_PREBUILT}/cmake_install.cmake")
    message(FATAL_ERROR "DSPINE_PREBUILT=${DSPINE_PREBUILT} is no finished build tree of dspine")
endif()
message(STATUS "dspine: installing from the finished build ${DSPINE_PREBUILT}")

install(CODE "
    execute_process(
        COMMAND \"${CMAKE_COMMAND}\" --install \"${DSPINE_PREBUILT}\"
                --prefix \"\${CMAKE_INSTALL_PREFIX}\"
        RESULT_VARIABLE status
        OUTPUT_QUIET)
    if(NOT status EQUAL 0)
        message(FATAL_ERROR \"installing from ${DSPINE_PREBUILT} failed\")
    endif()")
