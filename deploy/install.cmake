# What depends on the prefix that the installation gets, which is known only now: the unit, with the
# paths of this one, and the configuration, which an operator may have changed since: one that is
# there is left alone.  /usr has its configuration in /etc, another prefix in its own etc.
get_filename_component(prefix "${CMAKE_INSTALL_PREFIX}" ABSOLUTE)
set(etc "${prefix}/etc")
if(prefix STREQUAL "/usr")
    set(etc "/etc")
endif()

# attnd_put writes a file below DESTDIR, if it is not there or may be replaced.
function(attnd_put path content replace)
    if(EXISTS "$ENV{DESTDIR}${path}" AND NOT replace)
        message(STATUS "Left alone: $ENV{DESTDIR}${path}")
        return()
    endif()
    message(STATUS "Installing: $ENV{DESTDIR}${path}")
    file(WRITE "$ENV{DESTDIR}${path}" "${content}")
    file(CHMOD "$ENV{DESTDIR}${path}" PERMISSIONS OWNER_READ OWNER_WRITE GROUP_READ WORLD_READ)
endfunction()

file(READ "${attnd_from}/attnd.service" unit)
string(REPLACE "/usr/sbin/attnd" "${prefix}/${attnd_sbindir}/attnd" unit "${unit}")
string(REPLACE "/etc/attnd/" "${etc}/attnd/" unit "${unit}")
attnd_put("${prefix}/lib/systemd/system/attnd.service" "${unit}" ON)

file(READ "${attnd_from}/attnd.conf" conf)
attnd_put("${etc}/attnd/attnd.conf" "${conf}" OFF)

set(CMAKE_INSTALL_MANIFEST_FILES "${CMAKE_INSTALL_MANIFEST_FILES};${prefix}/lib/systemd/system/attnd.service")
